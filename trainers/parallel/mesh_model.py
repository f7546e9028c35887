"""One rank's part of a model that is distributed over up to three mesh dimensions, and how to gather the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from shardlab.cell import Cell
from trainers import dtypes, model_options
from trainers.deferred_init import Deferred
from trainers.parallel import fsdp

if TYPE_CHECKING:
    from trainers.ranks import Ranks
    from trainers.task import Task


def mesh_of(cell: Cell, ranks: Ranks) -> DeviceMesh:
    """The mesh (pp, dp, tp) of all ranks. tp sends most, so its ranks are neighbours; pp sends least."""
    return ranks.mesh((cell.pp, cell.dp, cell.tp), ("pp", "dp", "tp"))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class MeshModel:
    """This rank's stages of a model (`parts`), or the whole model as the only part; `module` contains all parts.

    stages: number of stages of the whole pipeline. blocks: the repeated blocks in the parts, with their wrappers. parameters:
    number of trainable parameters of the whole model. padded: elements inside (True) and outside (False) of blocks, as sharded
    over dp: the rows of each parameter are padded to a multiple of the dp ranks.
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
        """stages: number of stages of the whole pipeline, which are given to its ranks in turn; 0 if the model has no stages.
        split: whether blocks are split over the mesh's tp ranks. sequence: whether positions between their layers are too.
        reshard_after_forward: for blocks, if the model is also sharded over the mesh's dp ranks; None if it is not."""
        self.mesh = mesh_of(cell, ranks)
        self.stages, self._plan, self._split, self.sequence = stages, task.plan(), split, sequence
        deferred = Deferred(task, ranks, dtypes.weight_dtype(cell.precision))
        model = deferred.model
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        bare = list(task.blocks(model))
        model_options.checkpoint_and_compile(cell, task, model)
        wrapped = list(task.blocks(model))
        self._divide(model, names)
        mine = {id(module) for module in self.module.modules()}
        self.blocks = [block for block in wrapped if id(block) in mine]
        self.padded = {True: 0, False: 0}
        self._partial: set[str] = set()
        # One block at a time, so that a rank never holds two whole blocks.
        for block, outer in zip(bare, wrapped, strict=True):
            deferred.fill(block, keep=id(outer) in mine)
            if id(outer) in mine:
                self._distribute(block, outer, cell.precision, reshard_after_forward)
        for module in model.modules():
            deferred.fill_own(module, keep=id(module) in mine)
        for part in self.parts.values() if reshard_after_forward is not None else ():
            rest = [p for p in part.parameters() if not isinstance(p, DTensor) or "dp" not in _dimensions(p)]
            self._shard(part, cell.precision, rest, inside=False, again=False)

    def _divide(self, model: nn.Module, names: dict[int, str]) -> None:
        """Divide the model into the stages of the whole pipeline and take those of this rank. names: of parameters, by id."""
        every = [self._plan.stage(model, index, self.stages) for index in range(self.stages)] or [model]
        here, ends = self.mesh["pp"].get_local_rank(), self.mesh["pp"].size()
        self.parts = {index: part for index, part in enumerate(every) if index % ends == here}
        self.module = nn.ModuleList(self.parts.values()) if self.stages else model
        self._names = {model_options.plain_name(name): names[id(p)] for name, p in self.module.named_parameters()}
        holders: dict[str, set[int]] = {}
        for index, part in enumerate(every):
            for parameter in part.parameters():
                holders.setdefault(names[id(parameter)], set()).add(index % ends)
        self._holders = {name: sorted(having) for name, having in holders.items()}
        self._tied_groups = self._meet({tuple(having) for having in self._holders.values() if len(having) > 1})

    def _distribute(self, block: nn.Module, outer: nn.Module, precision: str, again: bool | None) -> None:
        """Split a block of this rank over tp and shard it over dp, if the model is. outer: the block with its wrappers. again:
        whether it is resharded after forward; None if it is not sharded."""
        if self._split:
            partial = set(map(id, self._plan.split(block, self.mesh["tp"], sequence=self.sequence)))
            self._partial |= {name for name, p in self.named() if id(p) in partial}
        if again is not None:
            self._shard(outer, precision, list(outer.parameters()), inside=True, again=again)

    def _shard(self, module: nn.Module, precision: str, parameters: list[nn.Parameter], *, inside: bool, again: bool) -> None:
        """Shard a block, or the rest of a part, over the mesh's dp ranks. Must be the last wrapper of the module.

        inside: whether it is a block. again: reshard_after_forward. The rest (parameters outside blocks) is not resharded after
        forward, because backward needs it at once.
        """
        mesh = self.mesh["dp"]
        self.padded[inside] += sum(fsdp.padded(local(parameter).shape, mesh.size()) for parameter in parameters)
        fully_shard(module, mesh=mesh, mp_policy=fsdp.policy(precision), reshard_after_forward=again)

    def _meet(self, sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The process groups of stages of this rank's pipeline that share a tied weight. A collective: all ranks call it."""
        found = {}
        lines = self.mesh.mesh.flatten(1)  # (pp, pipelines)
        for ends in sorted(sets):
            pipelines = [lines[list(ends), line].tolist() for line in range(lines.shape[1])]
            group, _ = dist.new_subgroups_by_enumeration(pipelines)  # type: ignore[no-untyped-call]
            if group is not None:
                found[ends] = group
        return found

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters by the names that `Task.model` gives them."""
        return [(self._names[model_options.plain_name(name)], p) for name, p in self.module.named_parameters()]

    def by_mesh(self) -> list[nn.Parameter]:
        """Parameter groups for an optimizer, one per mesh: its fused kernels do not support parameters of several meshes."""
        groups: dict[object, list[nn.Parameter]] = {}
        for _, parameter in self.named():
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return [{"params": group} for group in groups.values()]  # type: ignore[misc]

    def tied(self) -> list[tuple[nn.Parameter, int]]:
        """Tied parameters, which stages on other ranks have too, and the number of ranks of this pipeline that have them."""
        return [(p, len(self._holders[name])) for name, p in self.named() if len(self._holders[name]) > 1]

    def sum_tied_gradients(self) -> None:
        """Sum the gradients of each tied weight over the stages that have the weight."""
        for name, parameter in self.named():
            ends = tuple(self._holders[name])
            if len(ends) > 1:
                assert parameter.grad is not None, f"{name} got no gradient"
                dist.all_reduce(local(parameter.grad), group=self._tied_groups[ends])

    def sum_partial_gradients(self) -> None:
        """Sum, over the tp ranks, the gradients of parameters that see only a slice of the positions on each rank."""
        gradients = [local(p.grad) for name, p in self.named() if name in self._partial and p.grad is not None]
        if gradients:
            together = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(together, group=self.mesh["tp"].get_group())
            for gradient, summed in zip(gradients, torch.split(together, [gradient.numel() for gradient in gradients])):
                gradient.copy_(summed.view_as(gradient))

    def partial(self) -> int:
        """Elements on this rank of parameters whose gradients `sum_partial_gradients` adds up."""
        return sum(local(p).numel() for name, p in self.named() if name in self._partial)

    def gradient_norm(self) -> torch.Tensor:
        """The L2 norm (0-dim) of the whole model's gradient; replicated parameters count once. All ranks call it."""
        squares = torch.zeros((), device=self.mesh.device_type)
        for name, parameter in self.named():
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float32)
                squares += norm.square() / (self._copies(parameter) * len(self._holders[name]))
        dist.all_reduce(squares)
        return squares.sqrt()

    def _copies(self, parameter: nn.Parameter) -> int:
        """Number of ranks of one stage that have the same elements of a parameter as this rank."""
        ranks = self.mesh["dp"].size() * self.mesh["tp"].size()
        if not isinstance(parameter, DTensor):
            return ranks
        cut = zip(parameter.placements, parameter.device_mesh.shape)
        return ranks // math.prod(size for placement, size in cut if not placement.is_replicate())

    def clip(self, max_norm: float) -> None:
        """Scale the gradients by max_norm / norm if this is below 1. All ranks call it."""
        scale = torch.clamp(max_norm / (self.gradient_norm() + 1e-6), max=1.0)  # 1e-6 as torch.nn.utils has it
        for _, parameter in self.named():
            if parameter.grad is not None:
                local(parameter.grad).mul_(scale)

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """The whole model's parameters, as `Engine.whole_parameters` has them. All ranks call it."""
        mine, found = dict(self.named()), {}
        pipeline, here = self.mesh["pp"].get_group(), self.mesh["pp"].get_local_rank()
        for name, shape in self._shapes.items():
            whole = torch.zeros(shape, device=self.mesh.device_type)
            if name in mine:
                gathered = mine[name].detach()
                gathered = _gathered(gathered) if isinstance(gathered, DTensor) else gathered
                gathered = self._plan.restored(name, gathered, self.mesh["tp"].size()) if self._split else gathered
                if here == self._holders[name][0]:
                    whole.copy_(gathered)
            if self.mesh["pp"].size() > 1:
                dist.all_reduce(whole, group=pipeline)  # all but one add zeros
            found[name] = whole.cpu()
        return found

    def order(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """`Engine.reordered` for the parameter of this name, or for optimizer state of the same layout."""
        if not self._split or name not in self._shapes or shape.numel() != self._shapes[name].numel():
            return None
        numbers = torch.arange(shape.numel()).view(shape)
        restored = self._plan.restored(name, numbers, self.mesh["tp"].size())
        return None if restored is numbers else restored


def _dimensions(cut: DTensor) -> tuple[str, ...]:
    return cut.device_mesh.mesh_dim_names or ()


def _gathered(cut: DTensor) -> torch.Tensor:
    """The whole tensor, gathered over one mesh dimension after the other; torch warns if all are gathered at once."""
    for dimension in range(cut.device_mesh.ndim):
        placements = list(cut.placements)
        placements[dimension] = Replicate()
        cut = cut.redistribute(placements=placements)
    return cut.to_local()
