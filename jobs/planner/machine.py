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
from shardlab.runs.prediction import PredictedRange, exactly


class PlannedMachine(msgspec.Struct, frozen=True):
    """The GPUs and links that a cell can use. Each field is None if it is not known.

    on_gpu: whether ranks have GPUs; if not, no other field has a value. name: the name of the GPU in the cluster file or in
    NVML. inside, between: the links between GPUs of a node, and between nodes. price: the price of a GPU for an hour.
    """

    on_gpu: bool
    name: str = ""
    gpu: GpuModel | None = None
    capacity: PredictedRange | None = None
    inside: PlannedLink | None = None
    between: PlannedLink | None = None
    price: float | None = None


NO_GPU = PlannedMachine(on_gpu=False)


def of_cluster(cluster: Cluster, gpu_type: str | None, measured: Sequence[MeasuredAllReduce] = ()) -> PlannedMachine:
    """The machine for cells with this GPU type. measured: the all-reduces that `provision` measured on this cluster."""
    if cluster.provider == "virtual":
        return NO_GPU  # practice nodes have GPUs only in the configuration of Slurm
    if cluster.provider == "local":
        return _here(cluster, measured)
    gpus = cluster.for_gpu_type(gpu_type).gpus
    if gpus is None or not gpus.per_node:
        return NO_GPU
    found = None if gpus.type is None else gpu.find(gpus.type, gpus.memory_gib)
    return _planned(cluster, gpus.type or "", found, gpu.capacity(found, gpus.memory_gib), measured)


def _here(cluster: Cluster, measured: Sequence[MeasuredAllReduce]) -> PlannedMachine:
    seen = host.observe().gpus
    if not seen:
        return NO_GPU
    found = gpu.find(seen[0].name)
    memory = exactly(seen[0].memory_bytes) if seen[0].memory_bytes else gpu.capacity(found, None)
    return _planned(cluster, seen[0].name, found, memory, measured)


def _planned(
    cluster: Cluster,
    name: str,
    found: GpuModel | None,
    memory: PredictedRange | None,
    measured: Sequence[MeasuredAllReduce],
) -> PlannedMachine:
    keys = cluster.network
    inside = link.named(keys.link, found) if keys.link is not None else link.of_gpu(found) if found is not None else None
    between = link.named(keys.between_nodes, found) if keys.between_nodes is not None else None
    on_these = [one for one in measured if one.backend == "nccl" and one.gpu is not None and gpu.find(one.gpu) == found]
    inside = (
        link_fit.link(inside.name if inside is not None else "link", [one for one in on_these if len(one.nodes) == 1]) or inside
    )
    between = _measured_between(keys.between_nodes, on_these, measured) or between
    return PlannedMachine(True, name, found, memory, inside, between, cluster.price_per_gpu_hour)


def _measured_between(
    named: str | None, on_these: Sequence[MeasuredAllReduce], measured: Sequence[MeasuredAllReduce]
) -> PlannedLink | None:
    """The link between nodes, as measured with NCCL or else with Gloo; None if it was not measured.

    named: the link that the cluster file names. on_these: the measurements with NCCL on the planned GPUs. measured: all
    measurements. Measurements with Gloo are used only for Ethernet: Gloo uses TCP, and NCCL uses RDMA over InfiniBand.
    """
    several = [one for one in on_these if len(one.nodes) > 1]
    if not several and (named is None or named.startswith("ethernet")):
        several = [one for one in measured if one.backend == "gloo" and len(one.nodes) > 1]
    return link_fit.link(named or "network", several)
