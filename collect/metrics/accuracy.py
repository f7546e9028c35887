"""Metrics of the accuracy of the model on the validation split, and of the training time until an accuracy was reached."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn
from collect.metric_values import make_result_metric
from collect.sources.steps import sum_training_time_s


def compute_time_to_accuracy(run: LoadedRun, accuracy_pct: float) -> Quantity | None:
    """Seconds of training until the first validation whose accuracy is at least accuracy_pct.

    None if no validation reached this accuracy, or if the run was suspended.
    """
    if run.was_suspended:
        return None
    seconds = sum_training_time_s(run.timed_steps)
    reaching_records = [record for record in run.validation if record.step in seconds and 100 * record.accuracy >= accuracy_pct]
    return Quantity(seconds[min(record.step for record in reaching_records)], "s") if reaching_records else None


METRICS = (
    make_result_metric(
        "final_accuracy",
        unit_factor=100,
        name="final_accuracy_pct",
        of_training=True,
        column=MetricColumn("summary", 100, "Accuracy", 3),
        unit="%",
        direction="higher is better",
        definition="Share of the targets of the validation split (labels, or next tokens) for which the most probable "
        "class was correct, after the last timed step.",
    ),
    Metric(
        name="time_to_accuracy_s",
        of_all_steps=True,
        unit="s",
        direction="lower is better",
        definition="Seconds of training (step times of the slowest rank) up to the first validation at which accuracy_pct of "
        "the targets were correct (MLPerf's figure of merit, Mattson et al., 2020). The resolution is the time between two "
        "validations. Only in claims, which state the accuracy: time_to_accuracy_s(strategy='ddp', accuracy_pct=75).",
        of_run_at=compute_time_to_accuracy,
        argument="accuracy_pct",
        example=75.0,
    ),
)
