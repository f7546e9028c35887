"""Extracts from the trace of one rank all data that is needed to explain the step time of the whole run.

`run_answers` then combines the data of all ranks, for example to find slow ranks. The data is extracted once per trace. It is
small enough to be cached in a file beside the trace.
"""

from __future__ import annotations

from typing import Any

import msgspec

from collect.traces import calls, idle_causes, intervals
from collect.traces.activities import find_activities
from collect.traces.attention import AttentionUse, find_attention
from collect.traces.breakdown import Source, count_steps
from collect.traces.calls import CollectiveCall, ProcessGroup
from collect.traces.idle_causes import IdleCauses, LaunchDelays
from collect.traces.layers import LayerTime, compute_layer_times
from collect.traces.matrix_products import MatrixProduct, find_matrix_products
from collect.traces.memory_use import MemoryUse, measure_memory
from collect.traces.phases import PhaseTime, compute_phase_times
from collect.traces.rank_work import RankWork, measure_work
from collect.traces.trace import Trace


class RankAnalysis(msgspec.Struct, frozen=True, kw_only=True):
    """The data from the trace of one rank, all profiled steps together. Times are in ns.

    span_ns = compute_ns + the exposed time of all calls + memory_ns + idle_ns.
    """

    rank: int | None
    source: Source
    steps: int
    host: str
    """The name of the host; "" if the trace does not say it."""
    gpu: str
    """The model of its GPUs; "" if the trace does not say it."""
    span_ns: int
    compute_ns: int
    memory_ns: int
    """The time of memory operations while nothing computes and no collective runs."""
    idle_ns: int
    idle: IdleCauses | None
    """The idle time by cause; None if the trace does not record the causes."""
    launches: LaunchDelays | None
    """The launch delays; None if no launch is recorded."""
    work: RankWork
    """What the time goes into."""
    groups: list[ProcessGroup]
    """The process groups of the rank."""
    calls: list[CollectiveCall]
    """The calls of collectives, sorted by start."""
    phases: list[PhaseTime]
    layers: list[LayerTime]
    """The time of each module."""
    memory: list[MemoryUse]
    """The memory of each device."""
    products: list[MatrixProduct]
    """The matrix products."""
    attention: list[AttentionUse]
    """The kernels of attention. Each is empty if the trace does not record it."""
    file: str = ""
    """The name of the trace file in the folder of the traces."""
    world_size: int | None = None
    """The number of ranks of the run; None if the trace does not say it."""
    is_bound: bool = False
    """Whether a time is only a bound, because the recording lacks something (`Breakdown.bounds`)."""

    @property
    def kind(self) -> str:
        """Whether the data comes from a GPU: `gpu` or `cpu`. Data of different kinds cannot be compared."""
        return "gpu" if self.source == "gpu" else "cpu"


def analyse_rank(trace: Trace) -> RankAnalysis | None:
    """Extract the data of a rank from its trace; None if `breakdown` has no result for the trace."""
    activities = find_activities(trace)
    if activities is None:
        return None
    groups, collective_calls = calls.list_calls(trace, activities)
    communicating_or_computing = intervals.unite_intervals(activities.compute, activities.communication)
    return RankAnalysis(
        rank=trace.rank,
        source=activities.source,
        steps=count_steps(trace),
        host=trace.head.host,
        gpu=trace.head.gpu,
        span_ns=activities.end_ns - activities.start_ns,
        compute_ns=activities.compute.length,
        memory_ns=activities.busy.length - communicating_or_computing.length,
        idle_ns=activities.end_ns - activities.start_ns - activities.busy.length,
        idle=idle_causes.find_idle_causes(trace, activities),
        launches=idle_causes.compute_launch_delays(trace, activities),
        work=measure_work(trace, activities),
        groups=groups,
        calls=collective_calls,
        phases=compute_phase_times(trace, activities),
        layers=compute_layer_times(trace, activities),
        memory=measure_memory(trace),
        products=find_matrix_products(trace, activities),
        attention=find_attention(trace, activities),
        world_size=trace.head.world_size,
    )


def make_rank_document(analysis: RankAnalysis) -> dict[str, Any]:
    """The results about one rank (idle time by cause, launch delays, phases, modules, memory, products) as JSON values."""
    return {
        "idle": None if analysis.idle is None else msgspec.to_builtins(analysis.idle),
        "launch_delay": None if analysis.launches is None else msgspec.to_builtins(analysis.launches),
        "work": analysis.work.make_document(),
        "phases": msgspec.to_builtins(analysis.phases),
        "layers": msgspec.to_builtins(analysis.layers),
        "memory": msgspec.to_builtins(analysis.memory),
        "matrix_products": [msgspec.to_builtins(entry) | {"flops_per_s": entry.flops_per_s} for entry in analysis.products],
        "attention": msgspec.to_builtins(analysis.attention),
    }
