"""The same-work proof with several seeds: when it is repeated, and what the verdict says."""

import pytest

from shardlab.runs.record import SameWork
from trainers.proof import proof_seeds

DIFFERENT = SameWork(verdict="different", why="d", gradient_norm_difference=2.8e-4, parameter_difference=3e-3)
PROVEN = SameWork(verdict="proven", why="p", gradient_norm_difference=1e-7, parameter_difference=1e-6)
NOT_PROVABLE = SameWork(verdict="not provable", why="n")


@pytest.mark.parametrize(
    ("verdicts", "jumps", "expected", "seeds"),
    [
        ((PROVEN,), True, "proven", [7]),
        ((DIFFERENT,), False, "different", [7]),
        ((DIFFERENT, PROVEN), True, "proven", [7, 8]),
        ((DIFFERENT, DIFFERENT, PROVEN), True, "proven", [7, 8, 9]),
        ((DIFFERENT, DIFFERENT, DIFFERENT), True, "different", [7, 8, 9]),
        ((DIFFERENT, NOT_PROVABLE, NOT_PROVABLE), True, "different", [7, 8, 9]),
        ((NOT_PROVABLE,), True, "not provable", [7]),
    ],
)
def test_other_seeds_are_used_only_if_a_model_whose_gradients_jump_looks_different(verdicts, jumps, expected, seeds):
    used, left = [], list(verdicts)

    def compare(seed):
        used.append(seed)
        found = left.pop(0)
        return SameWork(**{name: getattr(found, name) for name in found.__struct_fields__}), jumps

    found = proof_seeds.prove_with_seeds(compare, 7)
    assert (found.verdict, used) == (expected, seeds)
    told = f"; with seed {seeds[-1]}: with seed 7, the gradient norm differs by 2.8e-04 and the parameters by 3.0e-03"
    assert (told in found.why) == (expected == "proven" and len(seeds) > 1)
