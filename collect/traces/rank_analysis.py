"""What the answers about a run need of one rank, computed once per trace: small enough to keep beside it."""

from __future__ import annotations

import msgspec

from collect.traces import calls, idle_causes, intervals
from collect.traces.activities import activities
from collect.traces.breakdown import Source, steps
from collect.traces.calls import CollectiveCall, ProcessGroup
from collect.traces.idle_causes import IdleCauses, LaunchDelays
from collect.traces.phases import PhaseTime, phases
from collect.traces.trace import Trace


class RankAnalysis(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, all profiled steps together. Times in ns.

    span_ns = compute_ns + the exposed time of all calls + memory_ns + idle_ns. memory_ns: memory operations while nothing
    computes and no collective runs. idle: by cause; None if the trace does not record it. host: the name of the host; gpu: the
    model of its GPUs; "" if the trace does not say it. calls: sorted by start.
    """

    rank: int | None
    source: Source
    steps: int
    host: str
    gpu: str
    span_ns: int
    compute_ns: int
    memory_ns: int
    idle_ns: int
    idle: IdleCauses | None
    launches: LaunchDelays | None
    groups: list[ProcessGroup]
    calls: list[CollectiveCall]
    phases: list[PhaseTime]

    @property
    def kind(self) -> str:
        """`gpu` or `cpu`: what the figures are of; those of two kinds do not compare."""
        return "gpu" if self.source == "gpu" else "cpu"


def analyse(trace: Trace) -> RankAnalysis | None:
    """The analysis of a trace; None where `breakdown` finds nothing to tell of."""
    active = activities(trace)
    if active is None:
        return None
    groups, collective_calls = calls.calls(trace, active)
    communicating_or_computing = intervals.either(active.compute, active.communication)
    return RankAnalysis(
        rank=trace.rank,
        source=active.source,
        steps=steps(trace),
        host=trace.head.host,
        gpu=trace.head.gpu,
        span_ns=active.end_ns - active.start_ns,
        compute_ns=active.compute.length,
        memory_ns=active.busy.length - communicating_or_computing.length,
        idle_ns=active.end_ns - active.start_ns - active.busy.length,
        idle=idle_causes.causes(trace, active),
        launches=idle_causes.launch_delays(trace, active),
        groups=groups,
        calls=collective_calls,
        phases=phases(trace, active),
    )
