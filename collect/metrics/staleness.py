"""Metrics of staleness: how old the parameters are from which a gradient was computed, if workers do not wait for each
other."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.metric_values import read_result_value

STALENESS_COUNTS_KEY = "knobs.effective.staleness_counts"  # the key of result.json


def _read_staleness_counts(run: LoadedRun) -> dict[int, int]:
    return {int(age): count for age, count in (read_result_value(run, STALENESS_COUNTS_KEY) or {}).items() if count}


def compute_mean_staleness(run: LoadedRun) -> Quantity | None:
    """The mean staleness over all pushes of gradients; None if the run has no parameter server."""
    count_by_age = _read_staleness_counts(run)
    if not count_by_age:
        return None
    return Quantity(sum(age * count for age, count in count_by_age.items()) / sum(count_by_age.values()), "updates")


def find_largest_staleness(run: LoadedRun) -> Quantity | None:
    """The largest staleness of any push of gradients; None if the run has no parameter server."""
    count_by_age = _read_staleness_counts(run)
    return Quantity(max(count_by_age), "updates") if count_by_age else None


_WHAT_IS_STALENESS = (
    "of a gradient: the number of updates of the parameters between the pull of the parameters from which a worker computed "
    "the gradient and its push (Ho et al., 2013). Counted by the first server over all pushes, including those of warm-up "
    "steps."
)
METRICS = (
    Metric(
        name="staleness_mean",
        column=MetricColumn("times", 60, "Staleness, mean", 3),
        unit="updates",
        direction="lower is better",
        definition=f"Mean staleness {_WHAT_IS_STALENESS}",
        of_run=compute_mean_staleness,
        reads=Reads(result=(STALENESS_COUNTS_KEY,)),
    ),
    Metric(
        name="staleness_max",
        column=MetricColumn("times", 70, "Staleness, max", 3),
        unit="updates",
        direction="lower is better",
        definition=f"Largest staleness {_WHAT_IS_STALENESS}",
        of_run=find_largest_staleness,
        reads=Reads(result=(STALENESS_COUNTS_KEY,)),
    ),
)
