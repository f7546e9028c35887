"""Repeats the same-work proof of a model with BatchNorm with other seeds if its work looks different.

These models have ReLU and max pooling, whose gradients jump. If rounding moves a value across such a jump, equal work looks
different: with one seed, 6 of 80 runs of resnet50-tiny with DDP on 8 ranks did. It depends on weights and data whether this
happens, while wrong work is wrong with every seed. Models without these layers are compared with one seed only.
"""

from __future__ import annotations

from collections.abc import Callable

from shardlab.runs.record import SameWork

MOST_SEEDS = 3  # the most seeds


def prove_with_seeds(prove_with_seed: Callable[[int], tuple[SameWork, bool]], seed: int) -> SameWork:
    """The verdict with the first seed, or with one of the next seeds if the work looks different with the first and is proven
    with that seed.

    prove_with_seed: compares the work with a seed; returns the verdict, and whether the model has BatchNorm. A collective.
    seed: the
    seed of the run.
    """
    first_verdict, has_jumps = prove_with_seed(seed)
    for other_seed in range(seed + 1, seed + MOST_SEEDS):
        if first_verdict.verdict != "different" or not has_jumps:
            break
        other_verdict, _ = prove_with_seed(other_seed)
        if other_verdict.verdict == "proven":
            other_verdict.why += (
                f"; with seed {other_seed}: with seed {seed}, the gradient norm differs by "
                f"{first_verdict.gradient_norm_difference:.1e} and "
                f"the parameters by {first_verdict.parameter_difference:.1e}, "
                "because rounding can look like other work in a model "
                "whose gradients jump"
            )
            return other_verdict
    return first_verdict
