"""Computes the time of a whole run from the time of a step, and the energy that its GPUs consume."""

from __future__ import annotations

import msgspec

from shardlab.cell import Cell
from shardlab.gpu_models import GpuModel
from shardlab.prediction import PredictedRange

START_S = PredictedRange(15.0, 45.0, 240.0)  # seconds before the first step: imports, NCCL, model, same-work proof; assumed
POWER = PredictedRange(0.45, 0.75, 1.0)  # share of a board's largest power while it trains; assumed
ITEMS = {"cifar10": 50_000, "mnist": 60_000, "imagenet": 1_281_167}  # the number of images in the official training split


class PredictedRunTime(msgspec.Struct, frozen=True):
    """The predicted time of a whole run in seconds, and the energy of its GPUs in kWh (None if their power is not known)."""

    time_s: PredictedRange
    energy_kwh: PredictedRange | None


def steps_of(cell: Cell) -> int | None:
    """The number of steps of a run, with its warm-up steps; None if the run counts epochs and the length of an epoch is known
    only when the data are read."""
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
    """The time and energy of a run; None if the number of its steps is not known. power_w: the power of one GPU in watts; None:
    not known."""
    steps = steps_of(cell)
    if steps is None:
        return None
    return with_energy(cell, START_S + step_s.times(steps), power_w)


def with_energy(cell: Cell, time_s: PredictedRange, power_w: PredictedRange | None) -> PredictedRunTime:
    """The time and energy of a run whose time is already known. power_w: as for `of`."""
    if power_w is None:
        return PredictedRunTime(time_s, None)
    pairs = zip(ends(time_s), ends(power_w), strict=True)
    return PredictedRunTime(time_s, PredictedRange(*(seconds / 3600 * cell.gpus * watts / 1000 for seconds, watts in pairs)))


def ends(span: PredictedRange) -> tuple[float, float, float]:
    """The values of a range, as (low, likely, high)."""
    return span.low, span.likely, span.high
