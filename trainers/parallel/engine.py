"""The base of the engines of tensor and pipeline parallelism and their combinations, whose ranks have only parts of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardlab.matrix.cell import Cell
from trainers.checkpointing import state_parts
from trainers.communication import Term
from trainers.model import loss_scaling, optimization
from trainers.parallel.mesh_model import local
from trainers.replicated import ReplicatedEngine

if TYPE_CHECKING:
    from trainers.checkpointing.state_parts import State
    from trainers.parallel.mesh_model import MeshModel
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


class MeshModelEngine(ReplicatedEngine):
    """An engine over a mesh. The ranks of the mesh dimensions tp and pp share one model and one slice of the data; the
    dimension dp is the number of slices."""

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, held: MeshModel) -> None:
        super().__init__(cell, task, ranks, held.module)
        self.held = held
        self.data_rank, self.data_ranks = held.mesh["dp"].get_local_rank(), held.mesh["dp"].size()
        self.optimizer = optimization.make(cell.optimizer, held.by_mesh())

    def clip(self, max_norm: float) -> None:
        self.held.clip(max_norm)

    def everywhere(self, overflowed: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(overflowed)  # summed over the whole mesh, because every rank has another part of the gradient
        return overflowed

    def gradient_norm(self) -> float:
        return float(self.held.gradient_norm())

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        return self.held.whole_parameters()

    def state(self) -> State:
        return {**state_parts.of_parameters(self.held.named(), self.optimizer), **state_parts.of_buffers(self.model)}

    def reordered(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        return self.held.order(name.rpartition("/")[2], shape)

    def parameters(self) -> int:
        return self.held.parameters

    def effective(self) -> dict[str, Any]:
        mesh = self.held.mesh
        return {
            **super().effective(),
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape)),
            "rank_parameters": sum(local(p).numel() for p in self.model.parameters()),
        }

    def agreeing(self) -> list[Term]:
        """The all-reduces of single numbers: the gradient norm for clipping, and the overflow flag for skipping a step."""
        ranks = self.held.mesh.size()
        norm = [] if self.cell.max_grad_norm is None else [Term("the gradient's norm", "all_reduce", 4, ranks)]
        return [*norm, *loss_scaling.sign(self.cell.precision, ranks)]
