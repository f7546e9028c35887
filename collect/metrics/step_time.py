"""Metrics of the time of a step: the median, and percentiles that show how much the time varies from step to step."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads


def compute_step_percentile(run: LoadedRun, quantile: float) -> Quantity | None:
    """A percentile of the step times of a run, in ms.

    The time of a step is the time of its slowest rank. Percentiles between two steps are interpolated linearly. quantile: which
    percentile, from 0 to 1.
    """
    percentile_ms = run.undisturbed_steps["step_ms"].quantile(quantile, interpolation="linear")
    return None if percentile_ms is None else Quantity(percentile_ms, "ms")


def _build_percentile_metric(name: str, quantile: float, statistic: str, column: MetricColumn | None = None) -> Metric:
    return Metric(
        name=name,
        column=column,
        unit="ms",
        direction="lower is better",
        definition=f"{statistic}, over the timed steps, of the step time of the slowest rank.",
        of_run=lambda run: compute_step_percentile(run, quantile),
        reads=Reads(steps="undisturbed"),
    )


METRICS = (
    _build_percentile_metric("step_time_ms", 0.50, "Median", MetricColumn("summary", 20, "Step, median")),
    _build_percentile_metric("step_time_p5_ms", 0.05, "5th percentile (linear)"),
    _build_percentile_metric("step_time_p95_ms", 0.95, "95th percentile (linear)"),
)
