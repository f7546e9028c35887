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
        definition=f"Bytes sent in one step by all ranks together {definition}, each collective as the ring that needs least.",
        of_run=_of(kind),
        exact=True,
    )


METRICS = (
    _metric("theory", "by the strategy's own statement of all its terms"),
    _metric("counted", "as the collectives of a step of the same-work proof were counted"),
    _metric("textbook", "as textbooks give it (2 psi for data parallel, 3 psi for ZeRO-3; psi: bytes of the gradients)"),
)
