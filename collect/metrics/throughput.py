"""The metric `throughput_per_s`: how many units of data all ranks together train on per second."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads


def throughput(run: LoadedRun) -> Quantity | None:
    """The throughput of a run: the units of data of all ranks in the timed steps, divided by the time of these steps.

    The time of a step is the time of its slowest rank. Steps that an instrument slowed down are left out.
    """
    world = run.undisturbed_steps
    milliseconds = float(world["step_ms"].sum())
    if milliseconds <= 0:
        return None
    unit = run.result.unit if run.result else "units"
    return Quantity(1000 * float(world["units"].sum()) / milliseconds, f"{unit}/s")


METRICS = (
    Metric(
        name="throughput_per_s",
        column=MetricColumn("summary", 10, "Throughput", has_interval=True),
        unit="units/s",
        direction="higher is better",
        definition="Units of data (tokens, images) of all ranks in the timed steps, divided by the sum of the slowest rank's "
        "step times.",
        of_run=throughput,
        reads=Reads(steps="undisturbed", result=("unit",)),
    ),
)
