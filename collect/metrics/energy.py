"""Metrics of the GPUs' energy while steps were timed, in total and per unit of data, and of their power before training."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.loading.telemetry import compute_covered_pct
from collect.metric import Metric, MetricColumn, Reads
from collect.metrics.network import LEAST_COVERAGE

# The idle power of a GPU is computed only if it has at least this many samples from before any process used it. There are
# such samples because the sampler starts seconds before the ranks.
IDLE_SAMPLES = 2


def energy(run: LoadedRun) -> Quantity | None:
    """Energy in joules of the GPUs that the run trained on, from the end of the first timed step to the end of the last timed
    step.

    The energy is computed from energy counters if each of these GPUs has a counter, else from power samples. None if a GPU has
    neither, if its samples cover less than 80 % of this time, or if the run was suspended or the clock of a host was set.
    """
    if run.was_suspended or run.clock_stepped or run.gpu_samples.is_empty() or (timed_window := run.timed_window) is None:
        return None
    run_gpus = run.result.gpus if run.result else None
    if run_gpus is not None and len(run.gpu_rows.rows_of_device) != len(run_gpus):
        return None  # some GPUs have no telemetry
    for column, measure_joules, energy_kind in (
        ("energy_j", _counter_energy, "counter"),
        ("power_w", _energy_from_power, "power samples"),
    ):
        joules_of_gpus = [measure_joules(times, values, timed_window) for times, values in run.gpu_rows.values(column).values()]
        if None not in joules_of_gpus:
            return Quantity(sum(joules for joules in joules_of_gpus if joules is not None), "J", energy_kind)
    return None


def energy_per_unit(run: LoadedRun) -> Quantity | None:
    """Energy of the GPUs in joules per unit of data, such as a token or an image.

    The units of the first timed step are not counted, because `energy` begins at the end of this step. None if the records lack
    steps between the first and the last, as the logs of an imported run may.
    """
    total_energy, rows = energy(run), run.timed_steps
    if total_energy is None or rows.is_empty() or np.ptp(rows["step"].to_numpy()) >= rows["step"].n_unique():
        return None
    units = float(rows.filter(pl.col("step") > rows["step"].min())["units"].sum())
    if units <= 0:
        return None
    unit = run.result.unit.removesuffix("s") if run.result else "unit"
    return Quantity(total_energy.value / units, f"J/{unit}", total_energy.kind)


def idle_power(run: LoadedRun) -> Quantity | None:
    """Power in watts of all GPUs of the run together, before the ranks of the run used the GPUs.

    For each GPU, it is the mean over the samples from before any process computes on the GPU; the result is the sum over the
    GPUs. None if any GPU has fewer than IDLE_SAMPLES such samples before the first step.
    """
    if run.gpu_samples.is_empty():
        return None
    first_step_s = run.steps["wall_s"].min()
    run_gpus = run.result.gpus if run.result else None
    if not isinstance(first_step_s, float):
        return None
    total_watts, measured_gpus = 0.0, 0
    for times, watts, process_counts in run.gpu_rows.values("power_w", "processes").values():
        if not len(times):
            continue
        busy_rows = np.flatnonzero(process_counts > 0)
        idle_rows = slice(busy_rows[0] if len(busy_rows) else None)
        idle_watts = watts[idle_rows][times[idle_rows] < first_step_s]
        if len(idle_watts) < IDLE_SAMPLES:
            return None
        total_watts, measured_gpus = total_watts + fmean(idle_watts.tolist()), measured_gpus + 1
    return Quantity(total_watts, "W") if measured_gpus and (run_gpus is None or measured_gpus == len(run_gpus)) else None


def _counter_energy(times: np.ndarray, counter: np.ndarray, timed_window: tuple[float, float]) -> float | None:
    """The growth of the energy counter of one GPU within the span, in joules, interpolated at both ends of the span.

    None if the samples do not extend beyond both ends of the span, if they cover less than 80 % of the span, or if the counter
    was reset. times, counter: of the samples of the GPU, ordered by time.
    """
    if not len(times) or times[0] > timed_window[0] or times[-1] < timed_window[1] or (np.diff(counter) < 0).any():
        return None
    if compute_covered_pct(times, timed_window) < 100 * LEAST_COVERAGE:
        return None
    first_j, last_j = np.interp(timed_window, times, counter)
    return float(last_j - first_j)


def _energy_from_power(times: np.ndarray, power_w: np.ndarray, timed_window: tuple[float, float]) -> float | None:
    """The energy of one GPU within the span, in joules: the area under its power samples, by the trapezoidal rule.

    For parts of the span without samples, the mean power is used. None if the samples cover less than 80 % of the span.
    times, power_w: of the samples of the GPU, ordered by time.
    """
    start, end = timed_window
    if compute_covered_pct(times, timed_window) < 100 * LEAST_COVERAGE:
        return None
    first_s, last_s = max(start, times[0]), min(end, times[-1])
    moments = np.concatenate(([first_s], times[(first_s < times) & (times < last_s)], [last_s]))
    joules = np.trapezoid(np.interp(moments, times, power_w), moments)
    return float(joules / (last_s - first_s) * (end - start))


_WHILE_TIMED = (
    "that the run trained on, between the ends of the first and the last timed step, by NVML's energy counters, or, if a GPU "
    "has no counter, by NVML's power samples (trapezoids between them). The energy of other GPUs, processors, memory and "
    "network is not included. Blank if there are no such samples, if they cover less than 80 % of that time, or if the clock "
    "of a host was set meanwhile."
)
METRICS = (
    Metric(
        name="energy_j",
        column=MetricColumn("times", 80, "Energy"),
        of_all_steps=True,
        unit="J",
        direction="lower is better",
        definition=f"Energy of the GPUs {_WHILE_TIMED}",
        of_run=energy,
        reads=Reads(samples="window", events=True, result=("gpus",)),
    ),
    Metric(
        name="energy_per_unit_j",
        column=MetricColumn("times", 90, "Energy per unit", 3),
        of_all_steps=True,
        unit="J/unit",
        direction="lower is better",
        definition=f"Energy per unit of data (token, image) of the steps in that time: of the GPUs {_WHILE_TIMED}",
        of_run=energy_per_unit,
        reads=Reads(steps="timed", samples="window", events=True, result=("gpus", "unit")),
    ),
    Metric(
        name="idle_power_w",
        unit="W",
        direction="neither",
        definition="Power of the GPUs that the run trained on, together, before any process computed on them: mean over NVML's "
        "power samples between the start of the run and the first process. Blank if a GPU has fewer than two such samples.",
        of_run=idle_power,
        reads=Reads(steps="all", samples="before the training", result=("gpus",)),
    ),
)
