"""Compares the bytes that the kernel's counters saw with the bytes that the collectives of the timed steps should send."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.metric_values import read_result_value
from collect.metrics.network import bound_sent_bytes, measure_loopback_bytes, measure_network_bytes

SENDING_INSTRUMENTS = {"checkpoints", "validation"}  # instruments whose collectives do not belong to any step
TOLERANCE_PCT = 6.0  # up to this difference, counters and collectives agree: 3 % error of the payload, 3 % packet headers
# largest uncertainty of the counted bytes, as a share of the expected bytes; beyond it there is no result
MAX_UNCERTAIN_SHARE = 0.03


def compute_wire_difference(run: LoadedRun) -> Quantity | None:
    """The bytes that the hosts sent minus the bytes that the steps should send, in percent of the bytes that the steps should
    send.

    Only for gloo, because the kernel counts all bytes that gloo sends. NCCL also uses NVLink, shared memory and RDMA, which the
    kernel does not count.
    """
    if run.backend != "gloo" or run.run is None or run.result is None or SENDING_INSTRUMENTS & set(run.result.instruments):
        return None
    expected_bytes_per_step = read_result_value(run, "communication_bytes.wire")
    network_sent, loopback_sent = measure_network_bytes(run), measure_loopback_bytes(run)
    if not expected_bytes_per_step or loopback_sent is None or (network_sent is None and run.run.world.nnodes > 1):
        return None
    # - 1: the bytes are counted from the end of the first timed step, so the bytes of this step are not included.
    expected_bytes = expected_bytes_per_step * (run.world_steps.height - 1)
    counted_bytes_bounds = bound_sent_bytes(run)
    if counted_bytes_bounds is None or counted_bytes_bounds[1] - counted_bytes_bounds[0] > MAX_UNCERTAIN_SHARE * expected_bytes:
        return None
    counted_bytes = loopback_sent.value + (network_sent.value if network_sent else 0)
    return Quantity(100 * (counted_bytes / expected_bytes - 1), "%")


METRICS = (
    Metric(
        name="wire_difference_pct",
        column=MetricColumn("sent", 60, "Counters against collectives"),
        unit="%",
        direction="neither",
        definition="Bytes that the hosts sent while steps were timed (the kernel's counters, network and loopback together) "
        "against the bytes that gloo sends for the collectives of these steps. Within 6 % (3 % for the payload, the rest for "
        "headers), counters and collectives agree. More: others sent too, or steps are so small that other messages count. "
        "Less: bytes are missing. Blank for NCCL, for runs with checkpoints or validation, and if the samples around the first "
        "and the last timed step leave more than 3 % of the bytes open, as in runs of less than about a minute at 2 samples "
        "per second (`instruments: {telemetry_hz: 50}` narrows this).",
        of_run=compute_wire_difference,
        reads=Reads(steps="timed", samples="window", events=True, run=("world.nnodes",), result=("communication_bytes.wire",)),
    ),
)
