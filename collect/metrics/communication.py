"""Metrics of the bytes that ranks send each other in a step: by the strategy's formula, counted, and as textbooks give them."""

from __future__ import annotations

from collect.metric import Metric, MetricColumn
from collect.metric_values import make_result_metric


def _build_sent_bytes_metric(counting_method: str, position: int, definition: str) -> Metric:
    return make_result_metric(
        f"communication_bytes.{counting_method}",
        name=f"sent_{counting_method}_bytes",
        column=MetricColumn("sent", position, f"Per step, {counting_method}"),
        unit="bytes",
        direction="lower is better",
        definition=f"Bytes sent in one step by all ranks together, {definition}. Each collective counts as the ring "
        "algorithm that sends the fewest bytes.",
        exact=True,
    )


METRICS = (
    _build_sent_bytes_metric("theory", 20, "computed with the strategy's own formula, which has all its terms"),
    _build_sent_bytes_metric("counted", 10, "counted from the collectives of one step of the same-work proof"),
    _build_sent_bytes_metric(
        "textbook", 30, "as given in textbooks (2 psi for data parallel, 3 psi for ZeRO-3; psi: bytes of the gradients)"
    ),
)
