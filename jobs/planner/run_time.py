"""The time of a whole run from the time of a step: the number of its steps, its start, and what its GPUs cost and consume."""

from __future__ import annotations

import msgspec

from shardlab.cell import Cell
from shardlab.gpu_models import GpuModel
from shardlab.prediction import PredictedRange

START_S = PredictedRange(15.0, 45.0, 240.0)  # processes, imports, NCCL, the model, the same-work proof; assumed
POWER = PredictedRange(0.45, 0.75, 1.0)  # share of a board's largest power while it trains; assumed
ITEMS = {"cifar10": 50_000, "mnist": 60_000, "imagenet": 1_281_167}  # of the official training splits


class PredictedRunTime(msgspec.Struct, frozen=True):
    """A whole run: seconds, and of the GPUs that train kWh (None if their power is not known)."""

    time_s: PredictedRange
    energy_kwh: PredictedRange | None


def steps_of(cell: Cell) -> int | None:
    """The steps of a run, warm-up steps included; None if an epoch's length is not known before the data are read."""
    if cell.steps is not None:
        return cell.steps + cell.warmup_steps
    items = cell.options.get("subset") or ITEMS.get(str(cell.options.get("data")))
    if not isinstance(items, int) or cell.epochs is None:
        return None
    return cell.epochs * max(1, items // cell.global_batch_size) + cell.warmup_steps


def assumed_power(gpu: GpuModel | None) -> PredictedRange | None:
    """The power of a GPU while it trains, in watts; None if its largest power is not known."""
    return None if gpu is None or gpu.power_w is None else POWER.times(gpu.power_w)


def of(cell: Cell, step_s: PredictedRange, power_w: PredictedRange | None) -> PredictedRunTime | None:
    """The time of a run; None if the number of its steps is not known. power_w: of one GPU, in watts; None: not known."""
    steps = steps_of(cell)
    if steps is None:
        return None
    return with_energy(cell, START_S + step_s.times(steps), power_w)


def with_energy(cell: Cell, time_s: PredictedRange, power_w: PredictedRange | None) -> PredictedRunTime:
    """A run of which the time is known. power_w: as for `of`."""
    if power_w is None:
        return PredictedRunTime(time_s, None)
    pairs = zip(ends(time_s), ends(power_w), strict=True)
    return PredictedRunTime(time_s, PredictedRange(*(seconds / 3600 * cell.gpus * watts / 1000 for seconds, watts in pairs)))


def ends(span: PredictedRange) -> tuple[float, float, float]:
    """(low, likely, high)."""
    return span.low, span.likely, span.high
