"""The base of the engines of tensor and pipeline parallelism and their combinations, whose ranks have only parts of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardlab.matrix.cell import Cell
from trainers.checkpointing import state_parts
from trainers.communication import Term
from trainers.model import loss_scaling, optimization
from trainers.parallel.mesh_model import local_tensor
from trainers.replicated import ReplicatedEngine

if TYPE_CHECKING:
    from trainers.checkpointing.state_parts import State
    from trainers.parallel.mesh_model import MeshModel
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


class MeshModelEngine(ReplicatedEngine):
    """An engine over a mesh. The ranks of the mesh dimensions tp and pp share one model and one slice of the data; the
    dimension dp is the number of slices."""

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, mesh_model: MeshModel) -> None:
        super().__init__(cell, task, ranks, mesh_model.module)
        self.mesh_model = mesh_model
        self.data_rank, self.data_ranks = mesh_model.mesh["dp"].get_local_rank(), mesh_model.mesh["dp"].size()
        self.optimizer = optimization.make_optimizer(cell.optimizer, mesh_model.parameter_groups())

    def clip(self, max_norm: float) -> None:
        self.mesh_model.clip(max_norm)

    def sum_overflow(self, overflowed: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(overflowed)  # summed over the whole mesh, because every rank has another part of the gradient
        return overflowed

    def gradient_norm(self) -> float:
        return float(self.mesh_model.gradient_norm())

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        return self.mesh_model.whole_parameters()

    def state(self) -> State:
        parts = state_parts.parameter_parts(self.mesh_model.task_parameters(), self.optimizer)
        return {**parts, **state_parts.buffer_parts(self.model)}

    def element_order(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        return self.mesh_model.element_order(name.rpartition("/")[2], shape)

    def parameters(self) -> int:
        return self.mesh_model.parameters

    def effective(self) -> dict[str, Any]:
        mesh = self.mesh_model.mesh
        return {
            **super().effective(),
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape)),
            "rank_parameters": sum(local_tensor(p).numel() for p in self.model.parameters()),
        }

    def agreement_terms(self) -> list[Term]:
        """The all-reduces of single numbers: the gradient norm for clipping, and the overflow flag for skipping a step."""
        ranks = self.mesh_model.mesh.size()
        norm = [] if self.cell.max_grad_norm is None else [Term("the gradient's norm", "all_reduce", 4, ranks)]
        return [*norm, *loss_scaling.overflow_flag_terms(self.cell.precision, ranks)]
