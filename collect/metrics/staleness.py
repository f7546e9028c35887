"""How old the parameters were that gradients had been computed on, where workers do not wait for each other."""

from __future__ import annotations

from collect.metric import Measured, Metric, Quantity


def _counts(measured: Measured) -> dict[int, int]:
    effective = measured.result.knobs.get("effective", {}) if measured.result else {}
    return {int(age): count for age, count in effective.get("staleness_counts", {}).items() if count}


def mean(measured: Measured) -> Quantity | None:
    """Mean staleness over all pushes; None where there is no parameter server."""
    counts = _counts(measured)
    if not counts:
        return None
    return Quantity(sum(age * count for age, count in counts.items()) / sum(counts.values()), "updates")


def largest(measured: Measured) -> Quantity | None:
    """The largest staleness of any push."""
    counts = _counts(measured)
    return Quantity(max(counts), "updates") if counts else None


_WHAT = (
    "of a gradient: the updates that were made to the parameters since its worker pulled those that it was computed on (Ho et "
    "al., 2013), by the first server's count of all pushes, those of warm-up steps included."
)
METRICS = (
    Metric(
        name="staleness_mean", unit="updates", direction="lower is better", definition=f"Mean staleness {_WHAT}", of_run=mean
    ),
    Metric(
        name="staleness_max",
        unit="updates",
        direction="lower is better",
        definition=f"Largest staleness {_WHAT}",
        of_run=largest,
    ),
)
