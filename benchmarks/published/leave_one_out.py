"""Fits the planner's constants without one program at a time, and prints how well they predict that program.

python benchmarks/published/leave_one_out.py [--only old|new]

A figure of compare.py could be good only because the constants were fitted to the same rows. Here, the rows of a program have
no part in the constants that predict them. It takes about ten minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from unittest.mock import patch

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
import report
from planned_rows import PlannedRow, plan_rows
from published_rows import read_rows

from jobs.planner import compute_time, device_profile, step_time
from jobs.planner.device_profile import AchievedShare
from shardlab.runs.prediction import PredictedRange

# What the fit multiplies: shares of the peak in 16 bits by kind of GPU and kernel, the share of convolutions of all GPUs, the
# bytes that other operators move, what few rows cost, and what hidden communication costs.
CONSTANTS = (
    "A100 products", "A100 attention", "H100 products", "H100 attention", "other products", "convolutions", "moved bytes",
    "few rows", "exposed",
)  # fmt: skip
STEPS = (1.15, 1.05, 1.02)  # the factors by which the fit changes a constant, from coarse to fine
PULL = 0.05  # how much a constant that the rows say little about is pulled to its committed value
SHARES, MOVED, FEW_ROWS, EXPOSED = (
    device_profile.read_achieved_shares(), compute_time.MOVED_BYTES_PER_SAVED, compute_time.FEW_ROWS_FACTOR,
    step_time.EXPOSED_SHARE,
)  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", choices=["old", "new"], help="only tables that are new, or only the others")
    only = options.parse_args().only
    rows = [row for row in read_rows() if only in (None, "new" if row.table.new else "old")]
    planned = report.with_time(plan_rows(rows, calibrated=False)[0])
    rows_by_program: dict[str, list[PlannedRow]] = defaultdict(list)
    for item in planned:
        rows_by_program[item.row.program].append(item)
    errors = {}
    for program, its_rows in rows_by_program.items():
        factors = fit([item for item in planned if item.row.program != program])
        errors[program] = measure_median_error(its_rows, factors)
        changed = ", ".join(f"{name} x {factor:.2f}" for name, factor in factors.items() if factor != 1)
        print(f"{program:<48}{errors[program]:>7.1%}   fitted without it: {changed or 'no constant changes'}", flush=True)
    print(f"median over programs of the median error of a program's rows: {median(errors.values()):.1%}")


def fit(planned: Sequence[PlannedRow]) -> dict[str, float]:
    """The factors of CONSTANTS with the smallest loss for these rows, by changing one constant at a time."""
    factors = dict.fromkeys(CONSTANTS, 1.0)
    best = measure_loss(planned, factors)
    for step in STEPS:
        is_better = True
        while is_better:
            is_better = False
            for name in CONSTANTS:
                for factor in (factors[name] * step, factors[name] / step):
                    if (loss := measure_loss(planned, {**factors, name: factor})) < best - 1e-6:
                        factors, best, is_better = {**factors, name: factor}, loss, True
    return factors


def measure_loss(planned: Sequence[PlannedRow], factors: dict[str, float]) -> float:
    """The mean absolute logarithm of predicted divided by measured time. A program with n rows weighs as sqrt(n) rows."""
    counts = Counter(item.row.program for item in planned)
    weights = [1 / math.sqrt(counts[item.row.program]) for item in planned]
    logarithms = [abs(math.log(ratio)) for ratio in predict_ratios(planned, factors)]
    pull = PULL * sum(math.log(factor) ** 2 for factor in factors.values())
    return sum(weight * logarithm for weight, logarithm in zip(weights, logarithms, strict=True)) / sum(weights) + pull


def measure_median_error(planned: Sequence[PlannedRow], factors: dict[str, float]) -> float:
    return median(abs(ratio - 1) for ratio in predict_ratios(planned, factors))


def predict_ratios(planned: Sequence[PlannedRow], factors: dict[str, float]) -> list[float]:
    """Predicted divided by measured time of a step for each row, with the constants times these factors."""
    shares = tuple(scale_shares(entry, factors) for entry in SHARES)
    ratios = []
    with (
        patch.object(device_profile, "read_achieved_shares", lambda: shares),
        patch.object(compute_time, "MOVED_BYTES_PER_SAVED", MOVED.times(factors["moved bytes"])),
        patch.object(compute_time, "FEW_ROWS_FACTOR", FEW_ROWS.times(factors["few rows"])),
        patch.object(
            step_time, "EXPOSED_SHARE", PredictedRange(EXPOSED.low, EXPOSED.likely * factors["exposed"], EXPOSED.high)
        ),
    ):
        device_profile.find_rates.cache_clear()
        for item in planned:
            predicted = step_time.predict_step_time(item.cell, item.machine)
            assert predicted is not None
            ratios.append(predicted.step_s.likely / report.measured_s(item))
    device_profile.find_rates.cache_clear()
    return ratios


def scale_shares(entry: AchievedShare, factors: dict[str, float]) -> AchievedShare:
    """An entry of achieved.yaml, with its shares of products, attention and convolutions times their factors."""
    gpu = next((name for name in ("A100", "H100") if name in entry.gpu), "other")
    is_16_bit = "bf16" in entry.precisions
    products = factors[f"{gpu} products"] if is_16_bit else 1.0
    attention = factors.get(f"{gpu} attention", 1.0) if is_16_bit else 1.0
    return msgspec.structs.replace(
        entry,
        products=_scale(entry.products, products),
        attention=_scale(entry.attention, attention),
        convolutions=_scale(entry.convolutions, factors["convolutions"]),
    )


def _scale(shares: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    low, likely, high = shares
    return low * factor, likely * factor, high * factor


if __name__ == "__main__":
    main()
