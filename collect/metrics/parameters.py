"""How large the model is."""

from __future__ import annotations

from collect.metric import Measured, Metric, Quantity


def parameters(measured: Measured) -> Quantity | None:
    """The result's count of trainable parameters of the whole model."""
    found = measured.result.parameters if measured.result else None
    return None if found is None else Quantity(found, "parameters")


METRICS = (
    Metric(
        name="parameters",
        unit="parameters",
        direction="neither",
        definition="Trainable parameters of the whole model, tied weights once, counted in the model that was trained.",
        of_run=parameters,
        exact=True,
    ),
)
