"""Metrics of the GPUs' energy while steps were timed, in total and per unit of data, and of their power before training."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.loading.telemetry import compute_covered_pct
from collect.metric import Metric, MetricColumn, Reads
from collect.metrics.network import MIN_COVERED_SHARE

# The idle power of a GPU is computed only if it has at least this many samples from before any process used it. There are
# such samples because the sampler starts seconds before the ranks.
MIN_IDLE_SAMPLES = 2


def measure_energy(run: LoadedRun) -> Quantity | None:
    """Energy in joules of the GPUs that the run trained on, from the end of the first timed step to the end of the last timed
    step.

    The energy is computed from energy counters if each of these GPUs has a counter, else from power samples. None if a GPU has
    neither, if its samples cover less than 80 % of this time, or if the run was suspended or the clock of a host was set.
    """
    if run.was_suspended or run.clock_stepped or run.gpu_samples.is_empty() or (timed_window := run.timed_window) is None:
        return None
    run_gpus = run.result.gpus if run.result else None
    if run_gpus is not None and len(run.gpu_rows.rows_by_device) != len(run_gpus):
        return None  # some GPUs have no telemetry
    for column, measure_joules, energy_kind in (
        ("energy_j", _measure_counter_energy, "counter"),
        ("power_w", _integrate_power, "power samples"),
    ):
        gpu_joules = [
            measure_joules(times_s, values, timed_window) for times_s, values in run.gpu_rows.get_values(column).values()
        ]
        if None not in gpu_joules:
            return Quantity(sum(joules for joules in gpu_joules if joules is not None), "J", energy_kind)
    return None


def measure_energy_per_unit(run: LoadedRun) -> Quantity | None:
    """Energy of the GPUs in joules per unit of data, such as a token or an image.

    The units of the first timed step are not counted, because `measure_energy` begins at the end of this step. None if the
    records lack steps between the first and the last, as the logs of an imported run may.
    """
    total_energy, steps = measure_energy(run), run.timed_steps
    if total_energy is None or steps.is_empty() or np.ptp(steps["step"].to_numpy()) >= steps["step"].n_unique():
        return None
    unit_count = float(steps.filter(pl.col("step") > steps["step"].min())["units"].sum())
    if unit_count <= 0:
        return None
    unit_name = run.result.unit.removesuffix("s") if run.result else "unit"
    return Quantity(total_energy.value / unit_count, f"J/{unit_name}", total_energy.kind)


def measure_idle_power(run: LoadedRun) -> Quantity | None:
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
    for sample_times_s, watts, process_counts in run.gpu_rows.get_values("power_w", "processes").values():
        if not len(sample_times_s):
            continue
        busy_rows = np.flatnonzero(process_counts > 0)
        idle_rows = slice(busy_rows[0] if len(busy_rows) else None)
        idle_watts = watts[idle_rows][sample_times_s[idle_rows] < first_step_s]
        if len(idle_watts) < MIN_IDLE_SAMPLES:
            return None
        total_watts, measured_gpus = total_watts + fmean(idle_watts.tolist()), measured_gpus + 1
    return Quantity(total_watts, "W") if measured_gpus and (run_gpus is None or measured_gpus == len(run_gpus)) else None


def _measure_counter_energy(times_s: np.ndarray, counter_j: np.ndarray, timed_window: tuple[float, float]) -> float | None:
    """The growth of the energy counter of one GPU within the span, in joules, interpolated at both ends of the span.

    None if the samples do not extend beyond both ends of the span, if they cover less than 80 % of the span, or if the counter
    was reset. times_s, counter_j: of the samples of the GPU, ordered by time.
    """
    if not len(times_s) or times_s[0] > timed_window[0] or times_s[-1] < timed_window[1] or (np.diff(counter_j) < 0).any():
        return None
    if compute_covered_pct(times_s, timed_window) < 100 * MIN_COVERED_SHARE:
        return None
    first_j, last_j = np.interp(timed_window, times_s, counter_j)
    return float(last_j - first_j)


def _integrate_power(sample_times_s: np.ndarray, power_w: np.ndarray, timed_window: tuple[float, float]) -> float | None:
    """The energy of one GPU within the span, in joules: the area under its power samples, by the trapezoidal rule.

    For parts of the span without samples, the mean power is used. None if the samples cover less than 80 % of the span.
    sample_times_s, power_w: of the samples of the GPU, ordered by time.
    """
    start_s, end_s = timed_window
    if compute_covered_pct(sample_times_s, timed_window) < 100 * MIN_COVERED_SHARE:
        return None
    first_s, last_s = max(start_s, sample_times_s[0]), min(end_s, sample_times_s[-1])
    moments_s = np.concatenate(([first_s], sample_times_s[(first_s < sample_times_s) & (sample_times_s < last_s)], [last_s]))
    joules = np.trapezoid(np.interp(moments_s, sample_times_s, power_w), moments_s)
    return float(joules / (last_s - first_s) * (end_s - start_s))


_ENERGY_MEANING = (
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
        definition=f"Energy of the GPUs {_ENERGY_MEANING}",
        of_run=measure_energy,
        reads=Reads(samples="window", events=True, result=("gpus",)),
    ),
    Metric(
        name="energy_per_unit_j",
        column=MetricColumn("times", 90, "Energy per unit", 3),
        of_all_steps=True,
        unit="J/unit",
        direction="lower is better",
        definition=f"Energy per unit of data (token, image) of the steps in that time: of the GPUs {_ENERGY_MEANING}",
        of_run=measure_energy_per_unit,
        reads=Reads(steps="timed", samples="window", events=True, result=("gpus", "unit")),
    ),
    Metric(
        name="idle_power_w",
        unit="W",
        direction="neither",
        definition="Power of the GPUs that the run trained on, together, before any process computed on them: mean "
        "over NVML's power samples between the start of the run and the first process. Blank if a GPU has fewer than "
        "two such samples.",
        of_run=measure_idle_power,
        reads=Reads(steps="all", samples="before the training", result=("gpus",)),
    ),
)
