"""The GPUs and links on which a cell would run, as far as the cluster file, this machine and the inventory tell."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jobs.planner import gpu, link, link_fit
from jobs.planner.link import PlannedLink
from shardlab.cluster.all_reduce import MeasuredAllReduce
from shardlab.cluster.cluster import Cluster
from shardlab.hardware import host
from shardlab.hardware.gpu_models import GpuModel
from shardlab.runs.prediction import PredictedRange, make_exact_range


class PlannedMachine(msgspec.Struct, frozen=True):
    """The GPUs and links that a cell can use. Each field is None if it is not known."""

    on_gpu: bool
    """Whether ranks have GPUs; if not, no other field has a value."""
    gpu_name: str = ""
    """The name of the GPU in the cluster file or in NVML."""
    gpu_model: GpuModel | None = None
    gpu_memory_bytes: PredictedRange | None = None
    link_inside_node: PlannedLink | None = None
    """The links between GPUs of a node."""
    link_between_nodes: PlannedLink | None = None
    """The links between nodes."""
    price_per_gpu_hour: float | None = None
    """The price of a GPU for an hour."""


PRACTICE_GPU = "practice"  # the type of GPUs that exist only in Slurm's configuration: ranks compute on the CPU
NO_GPU_MACHINE = PlannedMachine(on_gpu=False)


def plan_machine(cluster: Cluster, gpu_type: str | None, all_reduces: Sequence[MeasuredAllReduce] = ()) -> PlannedMachine:
    """The machine for cells with this GPU type. all_reduces: the all-reduces that `provision` measured on this cluster."""
    if cluster.provider == "virtual":
        return NO_GPU_MACHINE  # practice nodes have GPUs only in the configuration of Slurm
    if cluster.provider == "local":
        return _plan_this_machine(cluster, all_reduces)
    gpus = cluster.select_gpu_type(gpu_type).gpus
    if gpus is None or not gpus.per_node or gpus.type == PRACTICE_GPU:
        return NO_GPU_MACHINE
    gpu_model = None if gpus.type is None else gpu.find_gpu_model(gpus.type, gpus.memory_gib)
    return _make_machine(cluster, gpus.type or "", gpu_model, gpu.find_gpu_memory(gpu_model, gpus.memory_gib), all_reduces)


def _plan_this_machine(cluster: Cluster, all_reduces: Sequence[MeasuredAllReduce]) -> PlannedMachine:
    observed_gpus = host.read_host().gpus
    if not observed_gpus:
        return NO_GPU_MACHINE
    gpu_model = gpu.find_gpu_model(observed_gpus[0].name)
    gpu_memory_bytes = (
        make_exact_range(observed_gpus[0].memory_bytes)
        if observed_gpus[0].memory_bytes
        else gpu.find_gpu_memory(gpu_model, None)
    )
    return _make_machine(cluster, observed_gpus[0].name, gpu_model, gpu_memory_bytes, all_reduces)


def _make_machine(
    cluster: Cluster,
    gpu_name: str,
    gpu_model: GpuModel | None,
    gpu_memory_bytes: PredictedRange | None,
    all_reduces: Sequence[MeasuredAllReduce],
) -> PlannedMachine:
    network_keys = cluster.network
    link_inside = link.make_data_sheet_link(gpu_model) if gpu_model is not None else None
    if network_keys.link is not None:
        link_inside = link.find_link(network_keys.link, gpu_model)
    link_between = link.find_network_link(network_keys, gpu_model)
    nccl_all_reduces = [
        all_reduce
        for all_reduce in all_reduces
        if all_reduce.backend == "nccl" and all_reduce.gpu is not None and gpu.find_gpu_model(all_reduce.gpu) == gpu_model
    ]
    link_inside = (
        link_fit.fit_link(
            link_inside.name if link_inside is not None else "link",
            [all_reduce for all_reduce in nccl_all_reduces if len(all_reduce.nodes) == 1],
        )
        or link_inside
    )
    name_between = network_keys.between_nodes if isinstance(network_keys.between_nodes, str) else None
    link_between = _fit_link_between_nodes(name_between, nccl_all_reduces, all_reduces) or link_between
    return PlannedMachine(True, gpu_name, gpu_model, gpu_memory_bytes, link_inside, link_between, cluster.price_per_gpu_hour)


def _fit_link_between_nodes(
    link_name: str | None, nccl_measurements: Sequence[MeasuredAllReduce], all_reduces: Sequence[MeasuredAllReduce]
) -> PlannedLink | None:
    """The link between nodes, as measured with NCCL or else with Gloo; None if it was not measured.

    link_name: the link that the cluster file names. nccl_measurements: the measurements with NCCL on the planned GPUs.
    all_reduces: all measurements. Measurements with Gloo are used only for Ethernet: Gloo uses TCP, and NCCL uses RDMA over
    InfiniBand."""
    multi_node_measurements = [measurement for measurement in nccl_measurements if len(measurement.nodes) > 1]
    if not multi_node_measurements and (link_name is None or link_name.startswith("ethernet")):
        multi_node_measurements = [
            measurement for measurement in all_reduces if measurement.backend == "gloo" and len(measurement.nodes) > 1
        ]
    return link_fit.fit_link(link_name or "network", multi_node_measurements)
