"""The metric `parameters`: the size of the model."""

from __future__ import annotations

from collect.metric_values import make_result_metric

METRICS = (
    make_result_metric(
        "parameters",
        name="parameters",
        unit="parameters",
        direction="neither",
        definition="Trainable parameters of the whole model, tied weights once, counted in the model that was trained.",
        exact=True,
    ),
)
