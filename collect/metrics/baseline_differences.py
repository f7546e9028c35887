"""Metrics that are differences between two cells: a cell and its baseline, or a cell and another cell that a study names.

Which cell is the baseline: collect/findings/comparability.py.
"""

from __future__ import annotations

from collect.loading.loaded_run import Quantity
from collect.metric import Direction, MeanPair, Metric


def subtract_baseline(compared: MeanPair, unit: str) -> Quantity | None:
    """The value of the cell minus the value of the baseline.

    None if the cell and the baseline have neither the same global batch size nor the same batch size per rank.
    """
    scaling = compared.scaling
    return Quantity(compared.value - compared.baseline_value, unit, scaling) if scaling else None


def decrease_in_points(compared: MeanPair) -> Quantity | None:
    """The value of the baseline minus the value of the cell, in percentage points, for a metric in percent."""
    difference = subtract_baseline(compared, "%")
    return Quantity(-difference.value, "%", difference.kind) if difference else None


def change_pct(compared: MeanPair) -> Quantity | None:
    """The value of the cell minus the value of the baseline, in percent of the baseline's value.

    None if the baseline's value is not greater than 0.
    """
    scaling = compared.scaling
    if scaling is None or compared.baseline_value <= 0:
        return None
    return Quantity(100 * (compared.value / compared.baseline_value - 1), "%", scaling)


def ratio_pct(compared: MeanPair, value: float, reference: float) -> Quantity | None:
    """The value of one cell (`value`) in percent of the value of the other cell (`reference`).

    None if the cells have neither the same global batch size nor the same batch size per rank, or if `reference` is 0 or less.
    """
    scaling = compared.scaling
    return Quantity(100 * (value / reference), "%", scaling) if scaling and reference > 0 else None


def _difference_metric(name: str, compares: str, definition: str) -> Metric:
    return Metric(
        name=name,
        unit="ms",
        direction="lower is better",
        definition=definition,
        of_cells=lambda compared: subtract_baseline(compared, "ms"),
        compares=compares,
    )


def _change_metric(name: str, compares: str, direction: Direction, definition: str) -> Metric:
    return Metric(name=name, unit="%", direction=direction, definition=definition, of_cells=change_pct, compares=compares)


METRICS = (
    _difference_metric("additional_compute_ms", "compute_ms", "Compute time of a profiled step minus that of the baseline."),
    _difference_metric(
        "additional_exposed_communication_ms",
        "exposed_communication_ms",
        "Exposed communication of a profiled step minus that of the baseline.",
    ),
    _difference_metric(
        "additional_waiting_ms",
        "waiting_ms",
        "Time of a profiled step that is lost to waiting for slow ranks, minus that of the baseline.",
    ),
    _difference_metric(
        "additional_idle_ms",
        "idle_ms",
        "Idle time of a profiled step minus that of the baseline (study 2, table 4.3.3: additional idle).",
    ),
    _difference_metric(
        "additional_non_compute_ms",
        "non_compute_ms",
        "Non-compute time of a profiled step minus that of the baseline (study 2, table 4.3.3, which calls it communication).",
    ),
    _difference_metric(
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
        of_cells=decrease_in_points,
        compares="compute_pct",
    ),
    _change_metric(
        "speed_gain_pct",
        "throughput_per_s",
        "higher is better",
        "Change of throughput relative to the baseline, or to the cell that a study names, in percent of its throughput "
        "(study 1, table 1: speed gain).",
    ),
    _change_metric(
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
        of_cells=lambda compared: subtract_baseline(compared, "%"),
        compares="final_accuracy_pct",
    ),
    Metric(
        name="memory_share_pct",
        unit="%",
        direction="lower is better",
        definition="Peak memory in percent of the baseline's peak memory (study 2, table 2.4: memory per GPU).",
        of_cells=lambda compared: ratio_pct(compared, compared.value, compared.baseline_value),
        compares="peak_memory_bytes",
    ),
    Metric(
        name="memory_efficiency_pct",
        unit="%",
        direction="higher is better",
        definition="The baseline's peak memory in percent of this cell's peak memory: 300 % if a cell needs a third (study 2, "
        "table 4.2.5).",
        of_cells=lambda compared: ratio_pct(compared, compared.baseline_value, compared.value),
        compares="peak_memory_bytes",
    ),
)
