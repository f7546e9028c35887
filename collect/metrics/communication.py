"""Metrics of the bytes that ranks send each other in a step: by the strategy's formula, counted, and as textbooks give them."""

from __future__ import annotations

from collections.abc import Callable

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn


def _make_sent_function(kind: str) -> Callable[[LoadedRun], Quantity | None]:
    def sent(run: LoadedRun) -> Quantity | None:
        counts = run.result.communication_bytes if run.result else None
        return Quantity(counts[kind], "bytes") if counts and kind in counts else None

    return sent


def _build_metric(kind: str, position: int, definition: str) -> Metric:
    return Metric(
        name=f"sent_{kind}_bytes",
        column=MetricColumn("sent", position, f"Per step, {kind}"),
        unit="bytes",
        direction="lower is better",
        definition=f"Bytes sent in one step by all ranks together, {definition}. Each collective counts as the ring algorithm "
        "that sends the fewest bytes.",
        of_run=_make_sent_function(kind),
        exact=True,
    )


METRICS = (
    _build_metric("theory", 20, "computed with the strategy's own formula, which has all its terms"),
    _build_metric("counted", 10, "counted from the collectives of one step of the same-work proof"),
    _build_metric(
        "textbook", 30, "as given in textbooks (2 psi for data parallel, 3 psi for ZeRO-3; psi: bytes of the gradients)"
    ),
)
