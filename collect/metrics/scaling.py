"""Metrics of the speed-up and the efficiency of a cell, compared with the baseline strategy on the same work."""

from __future__ import annotations

from collect.loading.loaded_run import Quantity
from collect.metric import MeanPair, Metric, MetricColumn


def compute_speed_up(mean_pair: MeanPair) -> Quantity | None:
    """The throughput of a cell divided by the throughput of its baseline.

    For strong and weak scaling, the ideal value on n times as many ranks is n. Only cache effects can give a larger value.
    """
    if mean_pair.scaling is None or mean_pair.baseline_value <= 0:
        return None
    return Quantity(mean_pair.value / mean_pair.baseline_value, "x", mean_pair.scaling)


def compute_scaling_efficiency(mean_pair: MeanPair) -> Quantity | None:
    """The speed-up of a cell divided by (ranks of the cell / ranks of its baseline), in percent."""
    speed_up = compute_speed_up(mean_pair)
    if speed_up is None:
        return None
    return Quantity(100 * speed_up.value * mean_pair.baseline.gpus / mean_pair.cell.gpus, "%", speed_up.kind)


METRICS = (
    Metric(
        name="speed_up",
        column=MetricColumn("summary", 30, "Speed-up", 3, {"strong": "Speed-up, strong", "weak": "Speed-up, weak"}),
        unit="x",
        direction="higher is better",
        definition="Mean throughput over the baseline's mean throughput, with the same workload, launcher, precision, sequence "
        "length and optimizer; strong: the same global batch; weak: the same batch per rank. Blank without such a baseline.",
        of_cells=compute_speed_up,
        compares="throughput_per_s",
    ),
    Metric(
        name="scaling_efficiency_pct",
        column=MetricColumn("summary", 40, "Efficiency", 3),
        unit="%",
        direction="higher is better",
        definition="Speed-up over the ratio of ranks to the baseline's ranks; 100 % is ideal.",
        of_cells=compute_scaling_efficiency,
        compares="throughput_per_s",
    ),
)
