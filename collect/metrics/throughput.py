"""The metric `throughput_per_s`: how many units of data all ranks together train on per second."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads


def measure_throughput(run: LoadedRun) -> Quantity | None:
    """The throughput of a run: the units of data of all ranks in the timed steps, divided by the time of these steps.

    The time of a step is the time of its slowest rank. Steps that an instrument slowed down are left out.
    """
    undisturbed_steps = run.undisturbed_steps
    training_ms = float(undisturbed_steps["step_ms"].sum())
    if training_ms <= 0:
        return None
    unit_name = run.result.unit if run.result else "units"
    return Quantity(1000 * float(undisturbed_steps["units"].sum()) / training_ms, f"{unit_name}/s")


METRICS = (
    Metric(
        name="throughput_per_s",
        column=MetricColumn("summary", 10, "Throughput", has_interval=True),
        unit="units/s",
        direction="higher is better",
        definition="Units of data (tokens, images) of all ranks in the timed steps, divided by the sum of the slowest rank's "
        "step times.",
        of_run=measure_throughput,
        reads=Reads(steps="undisturbed", result=("unit",)),
    ),
)
