"""The GPUs and links on which a cell would run, as far as the cluster file, this machine and the inventory tell."""

from __future__ import annotations

import msgspec

from jobs.planner import gpu, link
from jobs.planner.link import PlannedLink
from shardlab import host
from shardlab.cluster import Cluster
from shardlab.gpu_models import GpuModel
from shardlab.prediction import PredictedRange, exactly


class PlannedMachine(msgspec.Struct, frozen=True):
    """What a cell may count on. Each part is None if it is not known.

    on_gpu: whether ranks have GPUs; None of the other parts is known if not. name: of the GPU, as the source calls it.
    inside, between: links between GPUs of a node, and between nodes. price: of a GPU for an hour.
    """

    on_gpu: bool
    name: str = ""
    gpu: GpuModel | None = None
    capacity: PredictedRange | None = None
    inside: PlannedLink | None = None
    between: PlannedLink | None = None
    price: float | None = None

    def for_nodes(self, nodes: int) -> PlannedLink | None:
        """The link that the slowest hop of a collective over so many nodes uses."""
        return self.inside if nodes == 1 else self.between


NO_GPU = PlannedMachine(on_gpu=False)


def of_cluster(cluster: Cluster, gpu_type: str | None, bus_bandwidth: float | None = None) -> PlannedMachine:
    """The machine for cells of this type. bus_bandwidth: bytes/s of an all-reduce between nodes that `provision` measured."""
    if cluster.provider == "virtual":
        return NO_GPU  # GPUs of practice nodes exist only in Slurm
    if cluster.provider == "local":
        return _here(cluster)
    gpus = cluster.for_gpu_type(gpu_type).gpus
    if gpus is None or not gpus.per_node:
        return NO_GPU
    found = None if gpus.type is None else gpu.find(gpus.type, gpus.memory_gib)
    return _planned(cluster, gpus.type or "", found, gpu.capacity(found, gpus.memory_gib), bus_bandwidth)


def _here(cluster: Cluster) -> PlannedMachine:
    seen = host.observe().gpus
    if not seen:
        return NO_GPU
    found = gpu.find(seen[0].name)
    memory = exactly(seen[0].memory_bytes) if seen[0].memory_bytes else gpu.capacity(found, None)
    return _planned(cluster, seen[0].name, found, memory, None)


def _planned(
    cluster: Cluster, name: str, found: GpuModel | None, memory: PredictedRange | None, bus_bandwidth: float | None
) -> PlannedMachine:
    keys = cluster.network
    inside = link.named(keys.link, found) if keys.link is not None else link.of_gpu(found) if found is not None else None
    between = link.named(keys.between_nodes, found) if keys.between_nodes is not None else None
    if bus_bandwidth is not None:
        between = link.measured(keys.between_nodes or "network", bus_bandwidth)
    return PlannedMachine(True, name, found, memory, inside, between, cluster.price_per_gpu_hour)
