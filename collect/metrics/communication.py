"""Metrics of the bytes that ranks send each other in a step: by the strategy's formula, counted, and as textbooks give them."""

from __future__ import annotations

from collect.metric import Metric, MetricColumn
from collect.metric_values import result_metric


def _build_metric(kind: str, position: int, definition: str) -> Metric:
    return result_metric(
        f"communication_bytes.{kind}",
        name=f"sent_{kind}_bytes",
        column=MetricColumn("sent", position, f"Per step, {kind}"),
        unit="bytes",
        direction="lower is better",
        definition=f"Bytes sent in one step by all ranks together, {definition}. Each collective counts as the ring algorithm "
        "that sends the fewest bytes.",
        exact=True,
    )


METRICS = (
    _build_metric("theory", 20, "computed with the strategy's own formula, which has all its terms"),
    _build_metric("counted", 10, "counted from the collectives of one step of the same-work proof"),
    _build_metric(
        "textbook", 30, "as given in textbooks (2 psi for data parallel, 3 psi for ZeRO-3; psi: bytes of the gradients)"
    ),
)
