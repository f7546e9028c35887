"""Hybrid sharding: a mesh of (replicas, shards). The ranks of a replica shard the model; all replicas hold the same model."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shardlab.cell import Cell
from shardlab.registry import Option

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainers.ranks import Ranks

REPLICAS = Option("replicas", 2, "number of groups of ranks; each group holds one sharded copy of the model", least=2)


def refuse_replicas(cell: Cell) -> str | None:
    """Why the ranks of a cell cannot be divided into the replicas, as a sentence, or None."""
    replicas = cell.options["replicas"]
    if isinstance(replicas, int) and replicas >= 2 and cell.gpus % replicas == 0 and cell.gpus // replicas >= 2:
        return None
    return (
        f"replicas: found {replicas} on {cell.gpus} ranks. Allowed: a divisor of {cell.gpus} from 2 that leaves each replica "
        "at least 2 ranks."
    )


def replicas_mesh(cell: Cell, ranks: Ranks) -> DeviceMesh:
    """The mesh (replicas, shards). The ranks of a replica have consecutive numbers, so they are on one node if possible."""
    from torch.distributed.device_mesh import init_device_mesh

    replicas = cast("int", cell.options["replicas"])
    shape = (replicas, ranks.world_size // replicas)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicas", "shards"))
