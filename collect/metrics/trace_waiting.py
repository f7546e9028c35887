"""Metrics of the idle time of a profiled step by cause, and of waiting for slow ranks. They always use exact times."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import WORK_KINDS, Metric, Reads
from collect.metric_values import NS_PER_MS, average_ms_per_step

if TYPE_CHECKING:
    from collect.traces.idle_causes import IdleCauses
    from collect.traces.stragglers import RankWaits

_NS_PER_US = 1e3


def _build_idle_metric(name: str, get_ns: Callable[[IdleCauses], int], definition: str) -> Metric:
    """Make a metric whose value is the idle time that has one cause, in ms per profiled step.

    get_ns: a function that returns this idle time for one rank, in ns. The value is None if no trace with profiled steps
    records the launches of kernels."""

    return Metric(
        name=name,
        unit="ms",
        direction="lower is better",
        definition=definition,
        of_run=lambda run: average_ms_per_step(
            run.traces.analyses, lambda rank: None if rank.idle is None else get_ns(rank.idle)
        ),
        reads=Reads(trace=(*WORK_KINDS, "profiler steps")),
    )


def compute_launch_delay(run: LoadedRun) -> Quantity | None:
    """The mean delay between the launch and the start of a kernel or memory operation, over all profiled ranks, in us.

    None if no trace records launches.
    """
    launch_delays = [analysis.launches for analysis in run.traces.analyses if analysis.launches is not None]
    if not launch_delays:
        return None
    return Quantity(
        sum(delay.total_ns for delay in launch_delays) / sum(delay.count for delay in launch_delays) / _NS_PER_US, "us", "gpu"
    )


def _read_complete_waits(run: LoadedRun) -> RankWaits:
    """How long ranks waited; without any rank if only a part of the ranks was profiled, because the others may be slower."""
    waits = run.traces.answers.waits
    return waits._replace(ranks=[], skew_ns=[]) if waits.is_partial else waits


def compute_waiting_time(run: LoadedRun) -> Quantity | None:
    """The time lost to waiting for slow ranks, in ms per step, as the mean over the ranks.

    None if the traces contain no call of a collective that was matched over several ranks.
    """
    steps = sum(analysis.steps for analysis in run.traces.analyses)
    lost_ns = [rank_wait.lost_ns for rank_wait in _read_complete_waits(run).ranks]
    return Quantity(sum(lost_ns) / steps / NS_PER_MS, "ms", run.traces.analyses[0].kind) if lost_ns and steps else None


def compute_waiting_share(run: LoadedRun) -> Quantity | None:
    """The time lost to waiting for slow ranks, in percent of the profiled time of all ranks.

    None if the traces contain no call of a collective that was matched over several ranks.
    """
    lost_pct = _read_complete_waits(run).lost_pct
    return None if lost_pct is None else Quantity(lost_pct, "%", run.traces.analyses[0].kind)


def compute_collective_skew(run: LoadedRun) -> Quantity | None:
    """The longest wait of any rank in a collective, as the mean over collectives, in us.

    Only collectives that were found in the traces of several ranks count. None if there is no such collective.
    """
    skews_ns = _read_complete_waits(run).skew_ns
    return Quantity(statistics.fmean(skews_ns) / _NS_PER_US, "us", run.traces.analyses[0].kind) if skews_ns else None


METRICS = (
    _build_idle_metric(
        "idle_host_ms",
        lambda idle: idle.host_ns,
        "Idle time of a profiled step in which the host has launched nothing that waits to run "
        "(HolisticTraceAnalysis: host wait). With gloo: the main thread is in no operator.",
    ),
    _build_idle_metric(
        "idle_launching_ms",
        lambda idle: idle.launching_ns,
        "Idle time of a profiled step in which the host is inside the call that launches the next work. 0 without a GPU.",
    ),
    _build_idle_metric(
        "idle_communication_ms",
        lambda idle: idle.communication_ns,
        "Idle time of a profiled step between the end of a collective and the start of work on another stream that "
        "was queued behind it, or while a collective runs on the host. With gloo: the main thread is in an operator of c10d.",
    ),
    _build_idle_metric(
        "idle_other_ms",
        lambda idle: idle.other_ns,
        "Idle time of a profiled step in which launched work does not start yet for another reason, such as the time "
        "that a launch takes. With gloo: the main thread is in an operator that does not compute.",
    ),
    Metric(
        name="launch_delay_us",
        unit="us",
        direction="lower is better",
        definition="Time from the end of the call that launches a kernel or memory operation to its start, 0 if it "
        "starts earlier; mean over all that were launched in the profiled steps. Work that queues behind other work "
        "has a long delay.",
        of_run=compute_launch_delay,
        reads=Reads(trace=("launched work",)),
    ),
    Metric(
        name="waiting_ms",
        unit="ms",
        direction="lower is better",
        definition="Time of a profiled step in which a rank waits in a collective for a rank that has not started it "
        "yet, and nothing computes. Mean over the profiled ranks; needs traces of several ranks.",
        of_run=compute_waiting_time,
        reads=Reads(trace=(*WORK_KINDS, "profiler steps")),
    ),
    Metric(
        name="waiting_pct",
        unit="%",
        direction="lower is better",
        definition="Share of the profiled time that is lost to waiting for slow ranks, as defined by waiting_ms.",
        of_run=compute_waiting_share,
        reads=Reads(trace=WORK_KINDS),
    ),
    Metric(
        name="collective_skew_us",
        unit="us",
        direction="lower is better",
        definition="How long the first rank of a collective waits for the last one; mean over the collectives that "
        "were matched over the profiled ranks (TraceLens: skew in start time).",
        of_run=compute_collective_skew,
        reads=Reads(trace=WORK_KINDS),
    ),
)
