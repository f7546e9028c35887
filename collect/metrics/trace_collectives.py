"""Metrics of one kind of collective in the profiled steps: its bandwidth, as nccl-tests defines it, and its hidden share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric

if TYPE_CHECKING:
    from collect.traces.collectives import CollectiveUse

OF_COLLECTIVE_MEANING = "`of` is a collective as torch.distributed names it, such as all_gather."
EXAMPLE_COLLECTIVE = "all_gather"
_TIME_MEANING = (
    "The time is that of the transfer, without waiting for slow ranks, if the calls were matched over ranks; else the whole "
    "duration. Over all process groups; blank unless all ranks of each group were profiled."
)


def compute_algorithm_bandwidth(run: LoadedRun, collective: str) -> Quantity | None:
    """The algorithm bandwidth of a collective in 1e9 bytes/s; None if the trace does not record the message size of every
    call."""
    return _compute_bandwidth(run, collective, [use.message_bytes for use in _select_collective_uses(run, collective)])


def compute_bus_bandwidth(run: LoadedRun, collective: str) -> Quantity | None:
    """The bus bandwidth of a collective in 1e9 bytes/s.

    None if the trace does not record the message size and the number of ranks of every call.
    """
    return _compute_bandwidth(run, collective, [use.bus_bytes for use in _select_collective_uses(run, collective)])


def compute_hidden_share(run: LoadedRun, collective: str) -> Quantity | None:
    """The share of the collective's time during which something computes, in percent; None if no rank called the collective."""
    collective_uses = _select_collective_uses(run, collective)
    total_ns = sum(use.total_ns for use in collective_uses)
    if not total_ns:
        return None
    return Quantity(100 * sum(use.hidden_ns for use in collective_uses) / total_ns, "%", run.traces.analyses[0].kind)


def _compute_bandwidth(
    run: LoadedRun, collective: str, sizes_bytes: list[int] | list[int | None] | list[float | None]
) -> Quantity | None:
    known_sizes_bytes = [size for size in sizes_bytes if size is not None]
    transfer_ns = sum(collective_use.timed_ns for collective_use in _select_collective_uses(run, collective))
    is_partial = any(collective_use.is_partial for collective_use in _select_collective_uses(run, collective))
    if len(known_sizes_bytes) < len(sizes_bytes) or not transfer_ns or is_partial:
        return None
    return Quantity(sum(known_sizes_bytes) / transfer_ns, "GB/s", run.traces.analyses[0].kind)


def _select_collective_uses(run: LoadedRun, collective: str) -> list[CollectiveUse]:
    return [collective_use for collective_use in run.traces.answers.collectives if collective_use.collective == collective]


METRICS = (
    Metric(
        name="algorithm_bandwidth_gb_per_s",
        unit="GB/s",
        direction="higher is better",
        definition=f"Size of a collective's messages over their time, in 1e9 bytes/s. {_TIME_MEANING} {OF_COLLECTIVE_MEANING}",
        of_run_at=compute_algorithm_bandwidth,
        argument="of",
        example=EXAMPLE_COLLECTIVE,
    ),
    Metric(
        name="bus_bandwidth_gb_per_s",
        unit="GB/s",
        direction="higher is better",
        definition="The algorithm bandwidth times the factor of nccl-tests for the collective and its number of ranks: what "
        f"compares with the bandwidth of a link in one direction, in 1e9 bytes/s. {_TIME_MEANING} {OF_COLLECTIVE_MEANING}",
        of_run_at=compute_bus_bandwidth,
        argument="of",
        example=EXAMPLE_COLLECTIVE,
    ),
    Metric(
        name="hidden_pct",
        unit="%",
        direction="higher is better",
        definition="Share of the durations of a collective's calls during which something computes, over all process groups "
        f"and profiled ranks. {OF_COLLECTIVE_MEANING}",
        of_run_at=compute_hidden_share,
        argument="of",
        example=EXAMPLE_COLLECTIVE,
    ),
)
