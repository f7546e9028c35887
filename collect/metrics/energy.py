"""What the GPUs drew while steps were timed, and what a unit of data cost."""

from __future__ import annotations

import itertools

import polars as pl

from collect.metric import Measured, Metric, Quantity
from collect.metrics.network import LEAST_COVERAGE
from collect.telemetry import covered


def energy(measured: Measured) -> Quantity | None:
    """Joules of all GPUs of the hosts between the ends of the first and the last timed step.

    None without power samples, where those of any GPU cover less than 80 % of that time, or where the run stood still in it.
    """
    if measured.paused or measured.samples.gpus.is_empty() or (span := measured.window) is None:
        return None
    gpus = measured.samples.gpus.drop_nulls("power_w").sort("wall_s")
    known = [_joules(rows, span) for _, rows in gpus.group_by("host", "uuid", maintain_order=True)]
    if not known or len(known) < measured.samples.gpus.select(pl.struct("host", "uuid").n_unique()).item() or None in known:
        return None
    return Quantity(sum(joules for joules in known if joules is not None), "J")


def energy_per_unit(measured: Measured) -> Quantity | None:
    """Joules over the units of data of the steps between those ends: all timed steps but the first."""
    total, rows = energy(measured), measured.steps
    if total is None:
        return None
    units = float(rows.filter(pl.col("step") > rows["step"].min())["units"].sum())
    if units <= 0:
        return None
    unit = measured.result.unit.removesuffix("s") if measured.result else "unit"
    return Quantity(total.value / units, f"J/{unit}")


def _joules(rows: pl.DataFrame, span: tuple[float, float]) -> float | None:
    """The trapezoids between one GPU's samples, cut to the span; their mean power holds for what they do not cover."""
    times, power = rows["wall_s"].to_list(), rows["power_w"].to_list()
    start, end = span
    if covered(times, span)[0] < 100 * LEAST_COVERAGE:
        return None
    joules = seconds = 0.0
    for (t0, p0), (t1, p1) in itertools.pairwise(zip(times, power, strict=True)):
        a, b = max(t0, start), min(t1, end)
        if b <= a:
            continue
        at_a, at_b = (p0 + (p1 - p0) * (moment - t0) / (t1 - t0) for moment in (a, b))
        joules += (at_a + at_b) / 2 * (b - a)
        seconds += b - a
    return joules / seconds * (end - start)


_WHILE = (
    "between the ends of the first and the last timed step, by NVML's power samples (trapezoids between them), idle GPUs of "
    "the hosts included; processors, memory and network are not in it. Blank without such samples, or where they cover less "
    "than 80 % of that time."
)
METRICS = (
    Metric(
        name="energy_j",
        of_all_steps=True,
        unit="J",
        direction="lower is better",
        definition=f"Energy of all GPUs {_WHILE}",
        of_run=energy,
    ),
    Metric(
        name="energy_per_unit_j",
        of_all_steps=True,
        unit="J/unit",
        direction="lower is better",
        definition=f"Energy per unit of data (token, image) of the steps in that time: of all GPUs {_WHILE}",
        of_run=energy_per_unit,
    ),
)
