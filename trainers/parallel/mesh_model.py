"""The part of a model that one rank has, if the model is distributed over a mesh of up to three dimensions."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardlab.matrix.cell import Cell
from trainers import dtypes, model_options
from trainers.checkpointing.state_parts import TensorPart
from trainers.model.deferred_init import DeferredModel
from trainers.parallel import fsdp

if TYPE_CHECKING:
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


def make_mesh(cell: Cell, ranks: Ranks) -> DeviceMesh:
    """The mesh (pp, dp, tp) of all ranks. tp sends the most bytes, so its ranks have consecutive numbers; pp sends least."""
    return ranks.make_mesh((cell.pp, cell.dp, cell.tp), ("pp", "dp", "tp"))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class MeshModel:
    """The part of a model that this rank has, and collectives on it.

    task: the task, which knows which ranks have which classes.
    stage_modules: the pipeline stages of this rank by number; without a pipeline, the whole model is the only part.
    module: a module that contains all stages of this rank.
    stages: number of stages of the whole pipeline; 0 without a pipeline.
    blocks: the repeated blocks in these stages, with their wrappers.
    parameter_count: number of trainable parameters of the whole model.
    split_embedding, split_head: whether this rank has a slice of an embedding, or of a head, whose rows are split over tp.
    padded_elements: number of elements inside (True) and outside (False) of blocks, when sharded over dp: the rows of each
        parameter are padded to a multiple of the number of dp ranks.
    """

    def __init__(
        self,
        cell: Cell,
        task: Task,
        ranks: Ranks,
        *,
        stages: int = 0,
        split: bool = False,
        sequence: bool = False,
        reshard_after_forward: bool | None = None,
    ) -> None:
        """stages: number of stages of the whole pipeline; rank r of n has the stages r, r + n, ...; 0: no pipeline.
        split: whether blocks are split over the tp ranks. sequence: whether the positions between split layers are split too.
        reshard_after_forward: whether blocks are resharded after forward, if the model is sharded over the dp ranks; None: the
        model is not sharded.
        """
        self.mesh = make_mesh(cell, ranks)
        self.task = copy.copy(task)
        self.stages, self._plan, self._split, self.sequence = stages, task.plan(), split, sequence
        deferred = DeferredModel(task, ranks, dtypes.weight_dtype(cell.precision))
        model = deferred.model
        self._shape_by_name = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.parameter_count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        name_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        bare_blocks = list(task.blocks(model))
        model_options.checkpoint_and_compile(cell, task, model)
        wrapped_blocks = list(task.blocks(model))
        if vocabulary_layers := self._find_vocabulary_layers(model):
            self.task.classes_group = self.mesh["tp"].get_group()
            # `_split_rows` pads the rows, so the model may get more columns of logits than it has classes.
            self.task.counted_classes = task.counted_classes or len(cast("Any", vocabulary_layers[1]).weight)
        is_tied = len({id(layer.weight) for layer in vocabulary_layers}) < len(vocabulary_layers)
        self._divide_into_stages(model, name_by_id)
        kept_modules = {id(module) for module in self.module.modules()}
        self.blocks = [block for block in wrapped_blocks if id(block) in kept_modules]
        self.padded_elements = {True: 0, False: 0}
        self._partial_names: set[str] = set()
        # One block at a time, so that a rank never has two whole blocks in memory.
        for block, wrapped_block in zip(bare_blocks, wrapped_blocks, strict=True):
            deferred.fill_module(block, keep=id(wrapped_block) in kept_modules)
            if id(wrapped_block) in kept_modules:
                self._distribute_block(block, wrapped_block, cell.precision, reshard_after_forward)
        for module in model.modules():
            deferred.fill_own_tensors(module, keep=id(module) in kept_modules)
            if module in vocabulary_layers and id(module) in kept_modules:
                self._split_rows(module)
        self.split_embedding, self.split_head = (id(layer) in kept_modules for layer in vocabulary_layers or (None, None))
        if is_tied and self.split_embedding and self.split_head:
            vocabulary_layers[1].weight = vocabulary_layers[0].weight
        for part in self.stage_modules.values() if reshard_after_forward is not None else ():
            other_parameters = [
                p for p in part.parameters() if not isinstance(p, DTensor) or "dp" not in (p.device_mesh.mesh_dim_names or ())
            ]
            self._shard_module(part, cell.precision, other_parameters, is_block=False, reshard=False)

    def _divide_into_stages(self, model: nn.Module, name_by_id: dict[int, str]) -> None:
        """Divide the model into all stages of the pipeline and keep those of this rank. name_by_id: of parameters."""
        all_parts = [self._plan.build_stage(model, index, self.stages) for index in range(self.stages)] or [model]
        stage_rank, pipeline_size = self.mesh["pp"].get_local_rank(), self.mesh["pp"].size()
        self.stage_modules = {index: part for index, part in enumerate(all_parts) if index % pipeline_size == stage_rank}
        self.module = nn.ModuleList(self.stage_modules.values()) if self.stages else model
        self._task_names = {model_options.plain_name(name): name_by_id[id(p)] for name, p in self.module.named_parameters()}
        ranks_by_name: dict[str, set[int]] = {}
        for index, part in enumerate(all_parts):
            for parameter in part.parameters():
                ranks_by_name.setdefault(name_by_id[id(parameter)], set()).add(index % pipeline_size)
        self._ranks_by_name = {name: sorted(ranks) for name, ranks in ranks_by_name.items()}
        self._tied_groups = self._create_tied_groups({tuple(ranks) for ranks in self._ranks_by_name.values() if len(ranks) > 1})

    def _distribute_block(self, block: nn.Module, wrapped: nn.Module, precision: str, reshard: bool | None) -> None:
        """Split a block of this rank over the tp ranks if the model is split; shard it over the dp ranks if it is sharded.

        wrapped: the block with its wrappers. reshard: whether the block is resharded after forward; None if it is not sharded.
        """
        if self._split:
            partial_ids = set(map(id, self._plan.split(block, self.mesh["tp"], sequence=self.sequence)))
            self._partial_names |= {name for name, p in self.list_task_parameters() if id(p) in partial_ids}
        if reshard is not None:
            self._shard_module(wrapped, precision, list(wrapped.parameters()), is_block=True, reshard=reshard)

    def _find_vocabulary_layers(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """(embedding of tokens, head), if their rows are split over the tp ranks; else empty."""
        if not self._split or self.mesh["tp"].size() == 1:
            return ()
        return tuple(model.get_submodule(name) for name in self._plan.vocabulary_layers or ())

    def _split_rows(self, layer: nn.Module) -> None:
        """Split the rows of an embedding of tokens, or of a head, over the tp ranks."""
        mesh = self.mesh["tp"]
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                rows = parameter.detach()
                if missing_rows := -len(rows) % mesh.size():  # padded with zeros to equal numbers of rows
                    rows = nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing_rows))
                rows = distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None)  # None: all ranks have equal weights
                layer._parameters[name] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        if isinstance(layer, nn.Embedding):
            layer.forward = partial(_embed_tokens, layer)  # type: ignore[method-assign]
        else:
            parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=None)

    def cut_padding(self, name: str, part: TensorPart) -> TensorPart:
        """The part of a parameter, or of its optimizer state, without the rows that pad a split embedding or head."""
        shape = self._shape_by_name[name]
        if part.shape[:1] <= shape[:1] or part.shape[1:] != shape[1:]:
            return part
        return TensorPart(part.memory[: max(0, shape[0] - part.offsets[0])], shape, part.offsets)

    def _shard_module(
        self, module: nn.Module, precision: str, parameters: list[nn.Parameter], *, is_block: bool, reshard: bool
    ) -> None:
        """Shard a block, or the rest of a part, over the dp ranks. No other wrapper may be applied afterwards.

        is_block: whether the module is a block. reshard: reshard_after_forward; false for the rest (parameters outside of
        blocks), because backward needs these parameters at once.
        """
        mesh = self.mesh["dp"]
        self.padded_elements[is_block] += sum(
            fsdp.count_padded_elements(local_tensor(p).shape, mesh.size()) for p in parameters
        )
        fully_shard(module, mesh=mesh, mp_policy=fsdp.make_mixed_precision_policy(precision), reshard_after_forward=reshard)

    def _create_tied_groups(self, position_groups: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Create the process groups of ranks of a pipeline that share a tied weight. A collective of all ranks.

        position_groups: for each group, the positions of its ranks in the pipeline. Returns the groups of this rank.
        """
        group_by_positions = {}
        pipeline_ranks = self.mesh.mesh.flatten(1)  # the ranks as a tensor (pp, pipelines): each column is a pipeline
        for positions in sorted(position_groups):
            pipelines = [pipeline_ranks[list(positions), line].tolist() for line in range(pipeline_ranks.shape[1])]
            group, _ = dist.new_subgroups_by_enumeration(pipelines)  # type: ignore[no-untyped-call]
            if group is not None:
                group_by_positions[positions] = group
        return group_by_positions

    def list_task_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters, with the names that they have in `Task.model`."""
        return [(self._task_names[model_options.plain_name(name)], p) for name, p in self.module.named_parameters()]

    def make_parameter_groups(self) -> list[nn.Parameter]:
        """The parameter groups for an optimizer: one group for each mesh, because fused optimizers do not support parameters of
        several meshes in one group."""
        groups: dict[object, list[nn.Parameter]] = {}
        for _, parameter in self.list_task_parameters():
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return [{"params": group} for group in groups.values()]  # type: ignore[misc]

    def list_tied_parameters(self) -> list[tuple[nn.Parameter, int]]:
        """For each tied parameter that other ranks of this pipeline have too: (parameter, number of ranks that have it)."""
        return [
            (p, len(self._ranks_by_name[name])) for name, p in self.list_task_parameters() if len(self._ranks_by_name[name]) > 1
        ]

    def count_messages(self) -> int:
        """The number of hidden states and their gradients that this rank sends to other stages for each micro-batch."""
        return sum((index > 0) + (index < self.stages - 1) for index in self.stage_modules)

    def sum_tied_gradients(self) -> None:
        """Sum the gradients of each tied weight over the stages that have the weight."""
        for name, parameter in self.list_task_parameters():
            holder_ranks = tuple(self._ranks_by_name[name])
            if len(holder_ranks) > 1:
                assert parameter.grad is not None, f"{name} got no gradient"
                dist.all_reduce(local_tensor(parameter.grad), group=self._tied_groups[holder_ranks])

    def sum_partial_gradients(self) -> None:
        """Sum over the tp ranks the gradients of parameters that see only a slice of the positions on each rank, such as layer
        norms with sequence parallelism."""
        gradients = [
            local_tensor(p.grad)
            for name, p in self.list_task_parameters()
            if name in self._partial_names and p.grad is not None
        ]
        if gradients:
            flat_gradients = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat_gradients, group=self.mesh["tp"].get_group())
            for gradient, summed in zip(gradients, torch.split(flat_gradients, [gradient.numel() for gradient in gradients])):
                gradient.copy_(summed.view_as(gradient))

    def count_partial_elements(self) -> int:
        """The number of elements, on this rank, of the parameters whose gradients `sum_partial_gradients` sums."""
        return sum(local_tensor(p).numel() for name, p in self.list_task_parameters() if name in self._partial_names)

    def compute_gradient_norm(self) -> torch.Tensor:
        """The L2 norm (0-dim) of the whole model's gradient; replicated parameters count once. A collective."""
        squared_norm = torch.zeros((), device=self.mesh.device_type)
        for name, parameter in self.list_task_parameters():
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(local_tensor(parameter.grad), dtype=torch.float32)
                squared_norm += norm.square() / (self._count_copies(parameter) * len(self._ranks_by_name[name]))
        dist.all_reduce(squared_norm)
        return squared_norm.sqrt()

    def _count_copies(self, parameter: nn.Parameter) -> int:
        """The number of ranks with the same stage that have the same elements of a parameter as this rank."""
        stage_ranks = self.mesh["dp"].size() * self.mesh["tp"].size()
        if not isinstance(parameter, DTensor):
            return stage_ranks
        placement_sizes = zip(parameter.placements, parameter.device_mesh.shape)
        return stage_ranks // math.prod(size for placement, size in placement_sizes if not placement.is_replicate())

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients by max_norm / norm if this ratio is below 1. A collective."""
        # 1e-6 as in torch.nn.utils.clip_grad_norm_
        clip_factor = torch.clamp(max_norm / (self.compute_gradient_norm() + 1e-6), max=1.0)
        for _, parameter in self.list_task_parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(clip_factor)

    def gather_whole_parameters(self) -> dict[str, torch.Tensor]:
        """The whole model's parameters, as in `Engine.whole_parameters`. A collective."""
        rank_parameters, weight_by_name = dict(self.list_task_parameters()), {}
        pipeline_group, stage_rank = self.mesh["pp"].get_group(), self.mesh["pp"].get_local_rank()
        for name, shape in self._shape_by_name.items():
            whole_parameter = torch.zeros(shape, device=self.mesh.device_type)
            if name in rank_parameters:
                parameter = rank_parameters[name].detach()
                parameter = _gather_dtensor(parameter) if isinstance(parameter, DTensor) else parameter
                parameter = self._plan.restore_parameter(name, parameter, self.mesh["tp"].size()) if self._split else parameter
                parameter = parameter[: len(whole_parameter)] if parameter.dim() else parameter  # without rows of padding
                if stage_rank == self._ranks_by_name[name][0]:
                    whole_parameter.copy_(parameter)
            if self.mesh["pp"].size() > 1:
                dist.all_reduce(whole_parameter, group=pipeline_group)  # this sum is a broadcast: all ranks but one add zeros
            weight_by_name[name] = whole_parameter.cpu()
        return weight_by_name

    def find_element_order(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """As `Engine.element_order`, for the parameter with this name, or for optimizer state of the same shape."""
        if not self._split or name not in self._shape_by_name or shape.numel() != self._shape_by_name[name].numel():
            return None
        indices = torch.arange(shape.numel()).view(shape)
        element_order = self._plan.restore_parameter(name, indices, self.mesh["tp"].size())
        return None if element_order is indices else element_order


def _embed_tokens(layer: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    """The embeddings (..., width) of tokens (...), of which each tp rank has a slice of the rows. torch's own RowwiseParallel
    would give each rank the gradient of all rows (torch 2.13)."""
    weight = layer.weight
    assert isinstance(weight, DTensor)
    own_rows = weight.to_local()
    local_tokens = tokens - weight.device_mesh.get_local_rank() * len(own_rows)
    is_own_token = (local_tokens >= 0) & (local_tokens < len(own_rows))
    embeddings = nn.functional.embedding(local_tokens.where(is_own_token, 0), own_rows).where(is_own_token[..., None], 0)
    if layer.padding_idx is not None:  # the embedding of this token is not trained
        embeddings = embeddings.detach().where((tokens == layer.padding_idx)[..., None], embeddings)
    return (
        DTensor.from_local(embeddings, weight.device_mesh, [Partial()], run_check=False)
        .redistribute(placements=[Replicate()])
        .to_local()
    )


def _gather_dtensor(tensor: DTensor) -> torch.Tensor:
    """The whole tensor of a DTensor. It is gathered over one mesh dimension after the other, because torch warns if it is
    gathered over all dimensions at once."""
    for dimension in range(tensor.device_mesh.ndim):
        placements = list(tensor.placements)
        placements[dimension] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
