"""Metrics of the bytes that ranks send each other in a step: by the strategy's formula, counted, and as textbooks give them."""

from __future__ import annotations

from collections.abc import Callable

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn


def _of(kind: str) -> Callable[[LoadedRun], Quantity | None]:
    def sent(run: LoadedRun) -> Quantity | None:
        counts = run.result.communication_bytes if run.result else None
        return Quantity(counts[kind], "bytes") if counts and kind in counts else None

    return sent


def _metric(kind: str, place: int, definition: str) -> Metric:
    return Metric(
        name=f"sent_{kind}_bytes",
        column=MetricColumn("sent", place, f"Per step, {kind}"),
        unit="bytes",
        direction="lower is better",
        definition=f"Bytes sent in one step by all ranks together, {definition}. Each collective counts as the ring algorithm "
        "that sends the fewest bytes.",
        of_run=_of(kind),
        exact=True,
    )


METRICS = (
    _metric("theory", 20, "computed with the strategy's own formula, which has all its terms"),
    _metric("counted", 10, "counted from the collectives of one step of the same-work proof"),
    _metric("textbook", 30, "as given in textbooks (2 psi for data parallel, 3 psi for ZeRO-3; psi: bytes of the gradients)"),
)
