"""Metrics of the share of the GPUs' peak FLOP/s that the computation of the model uses (MFU and HFU)."""

from __future__ import annotations

import msgspec

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.metrics.throughput import measure_throughput
from shardlab.hardware.gpu_models import find_peak_flops


def compute_mfu(run: LoadedRun) -> Quantity | None:
    """MFU (model FLOPs utilization): throughput times the FLOPs of a unit of data, over the peak FLOP/s of all GPUs, in
    percent.

    None if the throughput, the FLOPs of a unit or the peak FLOP/s is not known.
    """
    flops_per_unit, precision = run.result.flops_per_unit if run.result else None, run.cell.precision
    gpu_names = {gpu.name for host in run.hosts for gpu in host.gpus or ()}
    if flops_per_unit is None or precision is None or len(gpu_names) != 1:
        return None
    throughput_per_s, peak_flops_per_s = measure_throughput(run), find_peak_flops(gpu_names.pop(), precision)
    if throughput_per_s is None or peak_flops_per_s is None:
        return None
    return Quantity(100 * throughput_per_s.value * flops_per_unit / (peak_flops_per_s * run.cell.gpus), "%")


def compute_hfu(run: LoadedRun) -> Quantity | None:
    """HFU (hardware FLOPs utilization), in percent: as MFU, but including the FLOPs that activation checkpointing computes
    again.

    Without activation checkpointing, HFU equals MFU. With activation checkpointing it is None, because the FLOPs that are
    computed again are not counted.
    """
    return compute_mfu(run) if run.cell.activation_checkpointing == "none" else None


_READS = Reads(steps="undisturbed", run=("cell.precision",), result=("flops_per_unit", "unit"), hosts=("gpus.name",))
METRICS = (
    Metric(
        name="mfu_pct",
        column=MetricColumn("summary", 80, "MFU", 3),
        unit="%",
        direction="higher is better",
        definition="Model FLOPs utilization (Chowdhery et al., PaLM, 2022, appendix B): throughput times the FLOPs of forward "
        "and backward of a unit (without what activation checkpointing computes again), divided by the peak FLOP/s of the GPUs "
        "in the cell's precision, from their data sheets. Blank on a CPU, and if the peak of the GPU is not known.",
        of_run=compute_mfu,
        reads=_READS,
    ),
    Metric(
        name="hfu_pct",
        unit="%",
        direction="higher is better",
        definition="Hardware FLOPs utilization (the same source): as MFU, with the FLOPs that checkpointing computes "
        "again. Equal to MFU without checkpointing. Blank with checkpointing, because records do not say how much of "
        "forward was computed twice.",
        of_run=compute_hfu,
        reads=msgspec.structs.replace(_READS, run=("cell.activation_checkpointing", *_READS.run)),
    ),
)
