"""What ranks sent each other for a step: by theory, as their collectives were counted, and as textbooks have it."""

from __future__ import annotations

from collections.abc import Callable

from collect.metric import Measured, Metric, Quantity


def _of(kind: str) -> Callable[[Measured], Quantity | None]:
    def sent(measured: Measured) -> Quantity | None:
        found = measured.result.communication_bytes if measured.result else None
        return Quantity(found[kind], "bytes") if found and kind in found else None

    return sent


def _metric(kind: str, definition: str) -> Metric:
    return Metric(
        name=f"sent_{kind}_bytes",
        unit="bytes",
        direction="lower is better",
        definition=f"Bytes sent in one step by all ranks together, {definition}. Each collective counts as the ring algorithm "
        "that sends the fewest bytes.",
        of_run=_of(kind),
        exact=True,
    )


METRICS = (
    _metric("theory", "computed with the strategy's own formula, which has all its terms"),
    _metric("counted", "counted from the collectives of one step of the same-work proof"),
    _metric("textbook", "as given in textbooks (2 psi for data parallel, 3 psi for ZeRO-3; psi: bytes of the gradients)"),
)
