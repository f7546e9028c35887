"""Metrics that are differences between two cells: a cell and its baseline, or a cell and another cell that a study names.

Which cell is the baseline: collect/findings/comparability.py.
"""

from __future__ import annotations

from collect.loading.loaded_run import Quantity
from collect.metric import Direction, MeanPair, Metric


def subtract_baseline(mean_pair: MeanPair, unit: str) -> Quantity | None:
    """The value of the cell minus the value of the baseline.

    None if the cell and the baseline have neither the same global batch size nor the same batch size per rank.
    """
    scaling = mean_pair.scaling
    return Quantity(mean_pair.value - mean_pair.baseline_value, unit, scaling) if scaling else None


def compute_decrease_in_points(mean_pair: MeanPair) -> Quantity | None:
    """The value of the baseline minus the value of the cell, in percentage points, for a metric in percent."""
    difference = subtract_baseline(mean_pair, "%")
    return Quantity(-difference.value, "%", difference.kind) if difference else None


def get_change_pct(mean_pair: MeanPair) -> Quantity | None:
    """The value of the cell minus the value of the baseline, in percent of the baseline's value.

    None if the baseline's value is not greater than 0.
    """
    scaling = mean_pair.scaling
    if scaling is None or mean_pair.baseline_value <= 0:
        return None
    return Quantity(100 * (mean_pair.value / mean_pair.baseline_value - 1), "%", scaling)


def compute_ratio_pct(mean_pair: MeanPair, value: float, reference_value: float) -> Quantity | None:
    """The value of one cell (`value`) in percent of the value of the other cell (`reference_value`).

    None if the cells have neither the same global batch size nor the same batch size per rank, or if `reference_value` is 0 or
    less.
    """
    scaling = mean_pair.scaling
    return Quantity(100 * (value / reference_value), "%", scaling) if scaling and reference_value > 0 else None


def _make_difference(name: str, compares: str, definition: str) -> Metric:
    return Metric(
        name=name,
        unit="ms",
        direction="lower is better",
        definition=definition,
        of_cells=lambda mean_pair: subtract_baseline(mean_pair, "ms"),
        compares=compares,
    )


def _build_change_metric(name: str, compares: str, direction: Direction, definition: str) -> Metric:
    return Metric(name=name, unit="%", direction=direction, definition=definition, of_cells=get_change_pct, compares=compares)


METRICS = (
    _make_difference("additional_compute_ms", "compute_ms", "Compute time of a profiled step minus that of the baseline."),
    _make_difference(
        "additional_exposed_communication_ms",
        "exposed_communication_ms",
        "Exposed communication of a profiled step minus that of the baseline.",
    ),
    _make_difference(
        "additional_waiting_ms",
        "waiting_ms",
        "Time of a profiled step that is lost to waiting for slow ranks, minus that of the baseline.",
    ),
    _make_difference(
        "additional_idle_ms",
        "idle_ms",
        "Idle time of a profiled step minus that of the baseline (study 2, table 4.3.3: additional idle).",
    ),
    _make_difference(
        "additional_non_compute_ms",
        "non_compute_ms",
        "Non-compute time of a profiled step minus that of the baseline (study 2, table 4.3.3, which calls it communication).",
    ),
    _make_difference(
        "overhead_ms",
        "kernel_ms",
        "Time of a profiled step from the first kernel to the last, minus that of the baseline: the additional compute, "
        "non-compute and idle time together (study 2, table 4.3.3: total overhead).",
    ),
    Metric(
        name="compute_loss_pct",
        unit="%",
        direction="lower is better",
        definition="Share of time in which a kernel computes: that of the baseline minus that of this cell, in percentage "
        "points (study 2, table 4.3.3, which calls it performance loss).",
        of_cells=compute_decrease_in_points,
        compares="compute_pct",
    ),
    _build_change_metric(
        "speed_gain_pct",
        "throughput_per_s",
        "higher is better",
        "Change of throughput relative to the baseline, or to the cell that a study names, in percent of its throughput "
        "(study 1, table 1: speed gain).",
    ),
    _build_change_metric(
        "memory_change_pct",
        "peak_memory_bytes",
        "lower is better",
        "Change of peak memory relative to the baseline, or to the cell that a study names, in percent of its peak memory. If "
        "a cell uses 30 % less, this is -30 %, as study 1 prints it in table 1.",
    ),
    Metric(
        name="accuracy_gain_pct",
        unit="%",
        direction="higher is better",
        definition="Final accuracy minus that of the baseline, or of the cell that a study names, in percentage points (study "
        "3, table 7: improvement).",
        of_cells=lambda mean_pair: subtract_baseline(mean_pair, "%"),
        compares="final_accuracy_pct",
    ),
    Metric(
        name="memory_share_pct",
        unit="%",
        direction="lower is better",
        definition="Peak memory in percent of the baseline's peak memory (study 2, table 2.4: memory per GPU).",
        of_cells=lambda mean_pair: compute_ratio_pct(mean_pair, mean_pair.value, mean_pair.baseline_value),
        compares="peak_memory_bytes",
    ),
    Metric(
        name="memory_efficiency_pct",
        unit="%",
        direction="higher is better",
        definition="The baseline's peak memory in percent of this cell's peak memory: 300 % if a cell needs a third (study 2, "
        "table 4.2.5).",
        of_cells=lambda mean_pair: compute_ratio_pct(mean_pair, mean_pair.baseline_value, mean_pair.value),
        compares="peak_memory_bytes",
    ),
)
