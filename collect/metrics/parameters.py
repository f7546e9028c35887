"""The metric `parameters`: the size of the model."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric


def parameter_count(run: LoadedRun) -> Quantity | None:
    """The number of trainable parameters of the whole model, from the result."""
    count = run.result.parameters if run.result else None
    return None if count is None else Quantity(count, "parameters")


METRICS = (
    Metric(
        name="parameters",
        unit="parameters",
        direction="neither",
        definition="Trainable parameters of the whole model, tied weights once, counted in the model that was trained.",
        of_run=parameter_count,
        exact=True,
    ),
)
