"""How many units of data the whole world trains on in a second."""

from __future__ import annotations

from collect.metric import Measured, Metric, Quantity


def throughput(measured: Measured) -> Quantity | None:
    """Units of all ranks over the time that the slowest rank took, summed over the timed steps; in units per second."""
    world = measured.undisturbed
    milliseconds = float(world["step_ms"].sum())
    if milliseconds <= 0:
        return None
    unit = measured.result.unit if measured.result else "units"
    return Quantity(1000 * float(world["units"].sum()) / milliseconds, f"{unit}/s")


METRICS = (
    Metric(
        name="throughput_per_s",
        unit="units/s",
        direction="higher is better",
        definition="Units of data (tokens, images) of all ranks in the timed steps, divided by the sum of the slowest rank's "
        "step times.",
        of_run=throughput,
    ),
)
