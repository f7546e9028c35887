"""Metrics of the time of the timed part of the training, and of the time of an epoch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.metric_values import make_result_metric, read_result_value


def average_epoch_times(run: LoadedRun, compute_average: Callable[[Sequence[float]], float]) -> Quantity | None:
    """An average of the epoch times in the result of a run, in seconds; None if the cell states its length in steps."""
    epoch_times_s = read_result_value(run, "epoch_time_s")
    return Quantity(compute_average(epoch_times_s), "s") if epoch_times_s else None


METRICS = (
    make_result_metric(
        "train_time_s",
        name="train_time_s",
        column=MetricColumn("times", 10, "Training"),
        of_all_steps=True,
        unit="s",
        direction="lower is better",
        definition="Wall time of the slowest rank from the start of the first timed step to the end of the last, "
        "including the time between steps, but without the time that instruments take between steps.",
    ),
    Metric(
        name="epoch_time_s",
        column=MetricColumn("times", 20, "Epoch, mean"),
        of_all_steps=True,
        unit="s",
        direction="lower is better",
        definition="Mean time of an epoch: the sum of its step times, in each step the time of the slowest rank.",
        of_run=lambda run: average_epoch_times(run, statistics.fmean),
        reads=Reads(result=("epoch_time_s",)),
    ),
    Metric(
        name="epoch_time_median_s",
        column=MetricColumn("times", 30, "Epoch, median"),
        of_all_steps=True,
        unit="s",
        direction="lower is better",
        definition="Median time of an epoch: the sum of its step times, in each step the time of the slowest rank.",
        of_run=lambda run: average_epoch_times(run, statistics.median),
        reads=Reads(result=("epoch_time_s",)),
    ),
)
