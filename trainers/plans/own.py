"""The plan for a workspace's own model, made from the functions `tensor_parallel` and `pipeline` of the user's file."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardlab.errors import InputError
from trainers.plans.plan import ModelPlan, share

if TYPE_CHECKING:
    from trainers.plugins.own_model import OwnModel

MOST_RANKS = 1024  # the largest tensor-parallel degree that is tried
STYLES = {"columns": ColwiseParallel, "rows": RowwiseParallel}


class OwnPlan(ModelPlan):
    """The plan of a user's file.

    own: the definitions of the file. find_blocks: returns the blocks of a model. model: a model on the meta device. shapes: the
    shapes of all inputs and outputs of its blocks, for one item, without the dimension of items.
    """

    def __init__(
        self,
        own: OwnModel,
        find_blocks: Callable[[nn.Module], Sequence[nn.Module]],
        model: nn.Module,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self._own, self._find_blocks = own, find_blocks
        blocks = list(find_blocks(model))
        if not blocks:
            raise InputError(f"{own.file}: the model has no repeated blocks. Needed: a function blocks(model).")
        if len(set(shapes)) != 1:
            found = ", ".join(str(shape) for shape in dict.fromkeys(shapes)) or "none"
            raise InputError(
                f"{own.file}: tensor and pipeline parallelism need blocks that take and return one tensor of one shape. "
                f"Found, for one item: {found}."
            )
        self.hidden = shapes[0]
        self.count, self._first = len(blocks), blocks[0]
        if own.tensor_parallel is not None:
            kinds = [sorted(_layers(own, copy.deepcopy(block), 1).values()) for block in blocks]
            if any(kind != kinds[0] for kind in kinds):
                raise InputError(f"{own.file}: tensor_parallel() splits some blocks into other numbers of layers than others.")
            self.backward_reductions, self.forward_reductions = kinds[0].count("columns"), kinds[0].count("rows")
            self._must_join()

    def _must_join(self) -> None:
        """Raises InputError if a split layer reads or writes a tensor of another width than the hidden state between blocks."""
        for name, how in self._layers_of_first(1).items():
            layer = self._first.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            width = layer.in_features if how == "columns" else layer.out_features
            if width != self.hidden[-1]:
                does = "reads" if how == "columns" else "writes"
                raise InputError(
                    f"{self._own.file}: tensor_parallel(): the layer {name}, split by {how}, {does} {width} numbers, and the "
                    f"hidden state between blocks has {self.hidden[-1]}. Allowed: layers that read it by columns, and layers "
                    "that write it by rows."
                )

    def degrees(self) -> tuple[int, ...]:
        """The numbers of ranks, from 2, over which the blocks can be split; empty if no number divides all split layers.

        Raises the InputError of the file if it refuses all possible numbers.
        """
        sizes = [_divided(self._first.get_submodule(n), how) for n, how in self._layers_of_first(1).items()]
        common = math.gcd(*sizes)
        divisors = [n for n in range(2, min(common, MOST_RANKS) + 1) if common % n == 0]
        found = tuple(n for n in divisors if self._splits(n))
        if divisors and not found:
            self._layers_of_first(divisors[0])  # raises the error of the file for this number of ranks
        return found

    def _layers_of_first(self, ranks: int) -> dict[str, str]:
        return _layers(self._own, copy.deepcopy(self._first), ranks)

    def _splits(self, ranks: int) -> bool:
        try:
            self._layers_of_first(ranks)
        except (InputError, RuntimeError):
            return False
        return True

    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        assert not sequence, "refused at plan time: the menu gives own workloads no positions"
        styles = {name: STYLES[how]() for name, how in _layers(self._own, block, mesh.size()).items()}
        parallelize_module(block, mesh, styles, src_data_rank=None)  # None: weights are not broadcast, because they are equal
        return []

    def restored(self, name: str, parameter: torch.Tensor, ranks: int) -> torch.Tensor:
        return parameter

    def stage(self, model: nn.Module, index: int, count: int) -> nn.Module:
        if count > self.count:
            raise InputError(f"{self._own.file}: the model has {self.count} blocks, too few for {count} pipeline stages.")
        ends = self._own.call("pipeline", model)
        if not (isinstance(ends, tuple) and len(ends) == 2 and all(isinstance(end, nn.Module) for end in ends)):
            raise InputError(
                f"{self._own.file}: pipeline() returned a {type(ends).__name__}. Allowed: (module before the blocks, module "
                "behind them)."
            )
        blocks = list(self._find_blocks(model))
        self._must_cover(model, [*ends, *blocks])
        part = blocks[share(len(blocks), index, count)]
        return OwnStage(ends[0] if index == 0 else None, part, ends[1] if index == count - 1 else None)

    def _must_cover(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Raises InputError if a parameter of the model is in none of these modules. Modules that are not part of the model do
        not count."""
        known = {id(module) for module in model.modules()}
        inside = {
            id(parameter)
            for outer in modules
            for module in outer.modules()
            if id(module) in known
            for parameter in module.parameters(recurse=False)
        }
        if missing := next((name for name, parameter in model.named_parameters() if id(parameter) not in inside), None):
            raise InputError(
                f"{self._own.file}: pipeline(): the parameter {missing} is neither before the blocks, in a block nor behind "
                "them."
            )


class OwnStage(nn.Module):
    """A pipeline stage of a user's model.

    before: the module before the blocks, only in the first stage, else None. blocks: the blocks of this stage. behind: the
    module after the blocks, only in the last stage, else None. The first stage gets the model's inputs, each other stage
    a hidden state; the last stage returns the model's outputs, each other stage a hidden state.
    """

    def __init__(self, before: nn.Module | None, blocks: Sequence[nn.Module], behind: nn.Module | None) -> None:
        super().__init__()
        self.before, self.blocks, self.behind = before, nn.ModuleList(blocks), behind

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        hidden = entering if self.before is None else self.before(entering)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if self.behind is None else self.behind(hidden)


def _divided(layer: Any, how: str) -> int:
    """The size of the dimension of a linear layer that is divided over the ranks. how: `columns` or `rows`."""
    return int(layer.out_features if how == "columns" else layer.in_features)


def _layers(own: OwnModel, block: nn.Module, ranks: int) -> dict[str, str]:
    """Call the function `tensor_parallel` of the file: name of each split linear layer -> `columns` or `rows`.

    The function may change the block. Raises InputError if it returns anything else, or if the size of a layer cannot be
    divided by the number of ranks.
    """
    found = own.call("tensor_parallel", block, ranks)
    if not isinstance(found, dict) or not found or not all(how in STYLES for how in found.values()):
        raise InputError(
            f"{own.file}: tensor_parallel() returned {found!r:.80}. Allowed: 'columns' or 'rows' for each layer that is split, "
            "such as {'up': 'columns', 'down': 'rows'}."
        )
    linear = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    for name, how in found.items():
        if name not in linear:
            raise InputError(
                f"{own.file}: tensor_parallel(): a block has no linear layer {name!r:.40}. "
                f"Allowed: {', '.join(linear) or 'none'}."
            )
        if _divided(linear[name], how) % ranks:
            size = _divided(linear[name], how)
            raise InputError(
                f"{own.file}: tensor_parallel(): the {size} {how} of the layer {name} cannot be divided by {ranks}."
            )
    return found
