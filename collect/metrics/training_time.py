"""Metrics of the time of the timed part of the training, and of the time of an epoch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn


def train_time(run: LoadedRun) -> Quantity | None:
    """The time of the timed part of the training, in seconds, as the result of the run contains it."""
    seconds = run.result.train_time_s if run.result else None
    return None if seconds is None else Quantity(seconds, "s")


def make_epoch_function(average: Callable[[Sequence[float]], float]) -> Callable[[LoadedRun], Quantity | None]:
    """Make the function of a metric. The function returns an average of the epoch times in the result of a run, in seconds.

    average: the function that computes the average. The value is None if the cell states its length in steps, not in epochs.
    """

    def of_run(run: LoadedRun) -> Quantity | None:
        epochs = run.result.epoch_time_s if run.result else None
        return Quantity(average(epochs), "s") if epochs else None

    return of_run


METRICS = (
    Metric(
        name="train_time_s",
        column=MetricColumn("times", 10, "Training"),
        of_all_steps=True,
        unit="s",
        direction="lower is better",
        definition="Wall time of the slowest rank from the start of the first timed step to the end of the last, including the "
        "time between steps, but without the time that instruments take between steps.",
        of_run=train_time,
    ),
    Metric(
        name="epoch_time_s",
        column=MetricColumn("times", 20, "Epoch, mean"),
        of_all_steps=True,
        unit="s",
        direction="lower is better",
        definition="Mean time of an epoch: the sum of its step times, in each step the time of the slowest rank.",
        of_run=make_epoch_function(statistics.fmean),
    ),
    Metric(
        name="epoch_time_median_s",
        column=MetricColumn("times", 30, "Epoch, median"),
        of_all_steps=True,
        unit="s",
        direction="lower is better",
        definition="Median time of an epoch: the sum of its step times, in each step the time of the slowest rank.",
        of_run=make_epoch_function(statistics.median),
    ),
)
