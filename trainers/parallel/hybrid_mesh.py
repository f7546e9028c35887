"""Ranks as a table of replicas by shards: a model is cut over the ranks of a row, and rows hold the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shardlab.cell import Cell
from shardlab.registry import Option

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainers.ranks import Ranks

REPLICAS = Option("replicas", 2, "groups of ranks that each hold one sharded model", least=2)


def refuse_replicas(cell: Cell) -> str | None:
    """Why the ranks of a cell cannot be dealt out so, as a sentence, or None."""
    replicas = cell.options["replicas"]
    if isinstance(replicas, int) and replicas >= 2 and cell.gpus % replicas == 0 and cell.gpus // replicas >= 2:
        return None
    return f"replicas: found {replicas} on {cell.gpus} ranks. Allowed: a divisor from 2 that leaves a replica 2 ranks or more."


def replicas_mesh(cell: Cell, ranks: Ranks) -> DeviceMesh:
    """The mesh (replicas, shards); ranks of a row are neighbours, so that a row lies on one node where it can."""
    from torch.distributed.device_mesh import init_device_mesh

    replicas = cast("int", cell.options["replicas"])
    shape = (replicas, ranks.world_size // replicas)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicas", "shards"))
