"""The metric `final_loss`: the loss at the end of the training."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads


def final_loss(run: LoadedRun) -> Quantity | None:
    """The loss of the last timed step: the mean over the global batch, before the update of the parameters."""
    losses = run.world["loss"]
    return None if losses.is_empty() or losses[-1] is None else Quantity(losses[-1], "nats")


METRICS = (
    Metric(
        name="final_loss",
        of_training=True,
        column=MetricColumn("summary", 90, "Final loss"),
        unit="nats",
        direction="lower is better",
        definition="Mean loss over the global batch (cross-entropy, in nats) at the last timed step, before its update.",
        of_run=final_loss,
        reads=Reads(steps="timed"),
    ),
)
