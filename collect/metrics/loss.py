"""The metric `final_loss`: the loss at the end of the training."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads


def read_final_loss(run: LoadedRun) -> Quantity | None:
    """The loss of the last timed step: the mean over the global batch, before the update of the parameters.

    A command of the user may tell a loss of any unit, and not at each step: its last one counts.
    """
    is_command = run.run is not None and run.run.cell.command is not None
    losses = run.world_steps["loss"].drop_nulls() if is_command else run.world_steps["loss"]
    return None if losses.is_empty() or losses[-1] is None else Quantity(losses[-1], "" if is_command else "nats")


METRICS = (
    Metric(
        name="final_loss",
        of_training=True,
        column=MetricColumn("summary", 90, "Final loss"),
        unit="nats",
        direction="lower is better",
        definition="Mean loss over the global batch (cross-entropy, in nats) at the last timed step, before its update. "
        "For a command of the user: the last loss that it told, whose unit is not known.",
        of_run=read_final_loss,
        reads=Reads(steps="timed"),
    ),
)
