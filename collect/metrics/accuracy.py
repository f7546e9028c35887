"""What the trained model knows of items that it was not trained on."""

from __future__ import annotations

from collect.metric import Measured, Metric, Quantity


def final_accuracy(measured: Measured) -> Quantity | None:
    """The result's final_accuracy in percent; None where the run was not validated."""
    found = measured.result.final_accuracy if measured.result else None
    return None if found is None else Quantity(100 * found, "%")


METRICS = (
    Metric(
        name="final_accuracy_pct",
        unit="%",
        direction="higher is better",
        definition="Share of the validation split's targets (labels, or next tokens) whose likeliest class was right, after "
        "the last timed step.",
        of_run=final_accuracy,
    ),
)
