"""Metrics from traces that record modules, memory or shapes: time of a module, peak memory, FLOP/s, time of attention."""

from __future__ import annotations

import statistics

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, Reads


def measure_layer_time(run: LoadedRun, module: str) -> Quantity | None:
    """The time of a module, forward and backward together, in ms per step; the mean over the ranks that were profiled by steps.

    None if no trace records the module, or if the time of its backward pass is not known. module: the name of the module in the
    trace.
    """
    recorded_layers = [
        (layer, rank_analysis)
        for rank_analysis in run.traces.analyses
        if rank_analysis.steps
        for layer in rank_analysis.layers
        if layer.name == module
    ]
    ns_by_rank = [
        (layer.forward + layer.backward) / rank_analysis.steps
        for layer, rank_analysis in recorded_layers
        if layer.backward is not None
    ]
    if not (ns_by_rank and len(ns_by_rank) == len(recorded_layers)):
        return None
    return Quantity(statistics.fmean(ns_by_rank) / 1e6, "ms", recorded_layers[0][1].kind)


def find_profiled_memory_peak(run: LoadedRun) -> Quantity | None:
    """The most memory that any rank had allocated on a device in the profiled steps, in bytes. None if no trace records memory.

    If a trace records the memory of a GPU, the memory of CPUs is not considered.
    """
    memory_uses = [use for analysis in run.traces.analyses if analysis.steps for use in analysis.memory]
    device_kind = "cpu" if all(use.device == "cpu" for use in memory_uses) else "gpu"
    peak_bytes = [use.peak_bytes for use in memory_uses if (use.device == "cpu") == (device_kind == "cpu")]
    return Quantity(max(peak_bytes), "bytes", device_kind) if peak_bytes else None


def find_profiled_reserved_peak(run: LoadedRun) -> Quantity | None:
    """The most memory that the allocator of any rank had reserved on a GPU in the profiled steps, in bytes.

    None if the trace of any rank does not record reserved memory.
    """
    memory_uses = [use for analysis in run.traces.analyses if analysis.steps for use in analysis.memory if use.device != "cpu"]
    reserved_bytes = [use.peak_reserved_bytes for use in memory_uses if use.peak_reserved_bytes is not None]
    return Quantity(max(reserved_bytes), "bytes", "gpu") if reserved_bytes and len(reserved_bytes) == len(memory_uses) else None


def compute_matrix_product_rate(run: LoadedRun) -> Quantity | None:
    """The FLOPs of all matrix products of the profiled ranks, divided by the time of these products, in FLOP/s.

    None if no trace records the shapes of tensors.
    """
    analyses = [analysis for analysis in run.traces.analyses if analysis.steps and analysis.products]
    product_ns = sum(product.total_ns for analysis in analyses for product in analysis.products)
    flops = sum(product.flops for analysis in analyses for product in analysis.products)
    return Quantity(flops / product_ns * 1e9, "FLOP/s", analyses[0].kind) if product_ns else None


def measure_attention_time(run: LoadedRun, backend: str) -> Quantity | None:
    """The time of an implementation of attention in ms per step, forward and backward, as the mean over the profiled ranks.

    None if this implementation did not run, or its kernels are not recorded. backend: the name of the implementation, such as
    flash.
    """
    analyses = [analysis for analysis in run.traces.analyses if analysis.steps]
    recorded_ns = [[use.total_ns for use in analysis.attention if use.backend == backend] for analysis in analyses]
    if not any(recorded_ns):
        return None
    ns_per_step = [
        sum(known_ns) / analysis.steps
        for analysis, times_ns in zip(analyses, recorded_ns, strict=True)
        if len(known_ns := [time_ns for time_ns in times_ns if time_ns is not None]) == len(times_ns)
    ]
    return Quantity(statistics.fmean(ns_per_step) / 1e6, "ms", analyses[0].kind) if len(ns_per_step) == len(analyses) else None


METRICS = (
    Metric(
        name="layer_ms",
        unit="ms",
        direction="lower is better",
        definition="Time of a module of the model in a profiled step with all modules that it calls, forward and backward. On "
        "a GPU: the union of the kernels that compute and of the memory operations that it launched, without collectives; on a "
        "CPU: the time of the host. Mean over the profiled ranks. Needs `instruments: {profile: {stacks: true}}`. `of` is the "
        "name of the module in the trace.",
        of_run_at=measure_layer_time,
        argument="of",
        example="Linear_0",
    ),
    Metric(
        name="profiled_peak_bytes",
        unit="bytes",
        direction="lower is better",
        definition="Most memory that the allocator of a GPU had allocated in the profiled steps, over the profiled ranks; on a "
        "CPU: most that was allocated since the recording began. Needs `instruments: {profile: {memory: true}}`.",
        of_run=find_profiled_memory_peak,
        reads=Reads(trace=("allocations", "profiler steps")),
    ),
    Metric(
        name="profiled_reserved_bytes",
        unit="bytes",
        direction="lower is better",
        definition="Most memory that the allocator of a GPU had reserved in the profiled steps, over the profiled ranks. Needs "
        "`instruments: {profile: {memory: true}}`.",
        of_run=find_profiled_reserved_peak,
        reads=Reads(trace=("allocations", "profiler steps")),
    ),
    Metric(
        name="matrix_product_flops_per_s",
        unit="FLOP/s",
        direction="higher is better",
        definition="FLOPs of all matrix products of the profiled steps (2 M N K, times the batch) over the sum of the "
        "durations of the kernels that they launched; on a CPU: of the operators. Over all profiled ranks. Needs "
        "`instruments: {profile: {shapes: true}}`.",
        of_run=compute_matrix_product_rate,
        reads=Reads(trace=("matrix products", "profiler steps")),
    ),
    Metric(
        name="attention_ms",
        unit="ms",
        direction="lower is better",
        definition="Time of the kernels of an implementation of attention in a profiled step, forward and backward; on a CPU: "
        "of its operators. Mean over the profiled ranks. `of` is flash, efficient, cudnn, flex, fused or math.",
        of_run_at=measure_attention_time,
        argument="of",
        example="flash",
    ),
)
