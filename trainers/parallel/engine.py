"""The base of the engines of tensor and pipeline parallelism and their combinations, whose ranks have only parts of a model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.checkpointing import state_parts
from trainers.model import optimization
from trainers.parallel.mesh_model import local_tensor
from trainers.replicated import ReplicatedEngine
from trainers.theory.mesh import list_mesh_terms
from trainers.theory.term import ModelPart, Term

if TYPE_CHECKING:
    from trainers.checkpointing.state_parts import State
    from trainers.parallel.mesh_model import MeshModel
    from trainers.ranks.ranks import Ranks


class MeshModelEngine(ReplicatedEngine):
    """An engine over a mesh. The ranks of the mesh dimensions tp and pp share one model and one slice of the data; the
    dimension dp is the number of slices."""

    is_pipelined = False  # whether the model is divided into stages

    def __init__(self, cell: Cell, ranks: Ranks, mesh_model: MeshModel) -> None:
        super().__init__(cell, mesh_model.task, ranks, mesh_model.module)
        self.mesh_model = mesh_model
        self.data_rank, self.data_ranks = mesh_model.mesh["dp"].get_local_rank(), mesh_model.mesh["dp"].size()
        self.optimizer = optimization.make_optimizer(cell.optimizer, mesh_model.make_parameter_groups())

    def clip(self, max_norm: float) -> None:
        self.mesh_model.clip_gradients(max_norm)

    def sum_overflow(self, overflowed: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(overflowed)  # summed over the whole mesh, because every rank has another part of the gradient
        return overflowed

    def gradient_norm(self) -> float:
        return float(self.mesh_model.compute_gradient_norm())

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        return self.mesh_model.gather_whole_parameters()

    def make_state_parts(self) -> State:
        parts = state_parts.make_parameter_parts(self.mesh_model.list_task_parameters(), self.optimizer)
        parts = {name: self.mesh_model.cut_padding(name.rpartition("/")[2], part) for name, part in parts.items()}
        parts = {name: part for name, part in parts.items() if part.memory.numel()}
        return {**parts, **state_parts.make_buffer_parts(self.model)}

    def element_order(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        return self.mesh_model.find_element_order(name.rpartition("/")[2], shape)

    def count_parameters(self) -> int:
        return self.mesh_model.parameter_count

    def effective(self) -> dict[str, Any]:
        mesh = self.mesh_model.mesh
        return {
            **super().effective(),
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape)),
            "rank_parameters": sum(local_tensor(p).numel() for p in self.model.parameters()),
        }

    def theory(self) -> list[Term]:
        mesh_model, cell, plan = self.mesh_model, self.cell, self.task.plan()
        model_part = ModelPart(
            elements=sum(mesh_model.padded_elements.values()),
            blocks=len(mesh_model.blocks),
            block_elements=mesh_model.padded_elements[True],
            hidden_elements=cell.micro_batch_size * math.prod(plan.hidden_shape),
            recomputed_blocks=model_options.count_changed_blocks(mesh_model.module)["checkpointed_blocks"],
            reductions=(plan.forward_reductions, plan.backward_reductions) if cell.tp > 1 else None,
            has_split_embedding=mesh_model.split_embedding,
            split_logit_rows=cell.micro_batch_size * plan.hidden_shape[0] if mesh_model.split_head else 0,
            partial_elements=mesh_model.count_partial_elements(),
            messages=mesh_model.count_messages(),
            tied=tuple((local_tensor(p).numel(), holders) for p, holders in mesh_model.list_tied_parameters()),
        )
        return cast("list[Term]", list_mesh_terms(cell, model_part, pipelined=self.is_pipelined))
