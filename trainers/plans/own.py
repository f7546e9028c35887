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
from trainers.plans.plan import ModelPlan, slice_stage_blocks

if TYPE_CHECKING:
    from trainers.plugins.own_model import OwnModel

MOST_RANKS = 1024  # the largest tensor-parallel degree that is tried
STYLES = {"columns": ColwiseParallel, "rows": RowwiseParallel}


class OwnPlan(ModelPlan):
    """The plan of a user's file.

    plugin: the definitions of the file. find_blocks: returns the blocks of a model. model: a model on the meta device.
    shapes: the shapes of all inputs and outputs of its blocks, for one item, without the dimension of items.
    """

    def __init__(
        self,
        plugin: OwnModel,
        find_blocks: Callable[[nn.Module], Sequence[nn.Module]],
        model: nn.Module,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self._plugin, self._find_blocks = plugin, find_blocks
        blocks = list(find_blocks(model))
        if not blocks:
            raise InputError(f"{plugin.file}: the model has no repeated blocks. Needed: a function blocks(model).")
        if len(set(shapes)) != 1:
            found_shapes = ", ".join(str(shape) for shape in dict.fromkeys(shapes)) or "none"
            raise InputError(
                f"{plugin.file}: tensor and pipeline parallelism need blocks that take and return one tensor of one shape. "
                f"Found, for one item: {found_shapes}."
            )
        self.hidden_shape = shapes[0]
        self.block_count, self._first_block = len(blocks), blocks[0]
        if plugin.tensor_parallel is not None:
            styles_by_block = [sorted(split_layers(plugin, copy.deepcopy(block), 1).values()) for block in blocks]
            if any(block_styles != styles_by_block[0] for block_styles in styles_by_block):
                raise InputError(
                    f"{plugin.file}: tensor_parallel() splits some blocks into other numbers of layers than others."
                )
            self.backward_reductions = styles_by_block[0].count("columns")
            self.forward_reductions = styles_by_block[0].count("rows")
            self._check_widths()

    def _check_widths(self) -> None:
        """Raises InputError if a split layer reads or writes a tensor of another width than the hidden state between blocks."""
        for name, style in self._list_block_layers(1).items():
            layer = self._first_block.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            width = layer.in_features if style == "columns" else layer.out_features
            if width != self.hidden_shape[-1]:
                verb = "reads" if style == "columns" else "writes"
                raise InputError(
                    f"{self._plugin.file}: tensor_parallel(): the layer {name}, split by {style}, {verb} {width} numbers, and "
                    f"the hidden state between blocks has {self.hidden_shape[-1]}. Allowed: layers that read it by columns, "
                    "and layers that write it by rows."
                )

    def find_degrees(self) -> tuple[int, ...]:
        """The numbers of ranks, from 2, over which the blocks can be split; empty if no number divides all split layers.

        Raises the InputError of the file if it refuses all possible numbers.
        """
        divided_sizes = [
            _find_divided_size(self._first_block.get_submodule(name), style)
            for name, style in self._list_block_layers(1).items()
        ]
        common_divisor = math.gcd(*divided_sizes)
        divisors = [ranks for ranks in range(2, min(common_divisor, MOST_RANKS) + 1) if common_divisor % ranks == 0]
        possible_degrees = tuple(ranks for ranks in divisors if self._can_split(ranks))
        if divisors and not possible_degrees:
            self._list_block_layers(divisors[0])  # raises the error of the file for this number of ranks
        return possible_degrees

    def _list_block_layers(self, ranks: int) -> dict[str, str]:
        return split_layers(self._plugin, copy.deepcopy(self._first_block), ranks)

    def _can_split(self, ranks: int) -> bool:
        try:
            self._list_block_layers(ranks)
        except (InputError, RuntimeError):
            return False
        return True

    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        assert not sequence, "refused at plan time: the menu gives own workloads no positions"
        styles = {name: STYLES[style]() for name, style in split_layers(self._plugin, block, mesh.size()).items()}
        parallelize_module(block, mesh, styles, src_data_rank=None)  # None: weights are not broadcast, because they are equal
        return []

    def build_stage(self, model: nn.Module, index: int, stage_count: int) -> nn.Module:
        if stage_count > self.block_count:
            raise InputError(
                f"{self._plugin.file}: the model has {self.block_count} blocks, too few for {stage_count} pipeline stages."
            )
        outer_modules = self._plugin.call_function("pipeline", model)
        if not (
            isinstance(outer_modules, tuple)
            and len(outer_modules) == 2
            and all(isinstance(module, nn.Module) for module in outer_modules)
        ):
            raise InputError(
                f"{self._plugin.file}: pipeline() returned a {type(outer_modules).__name__}. Allowed: (module before the "
                "blocks, module behind them)."
            )
        blocks = list(self._find_blocks(model))
        self._check_coverage(model, [*outer_modules, *blocks])
        stage_blocks = blocks[slice_stage_blocks(len(blocks), index, stage_count)]
        return OwnStage(
            outer_modules[0] if index == 0 else None, stage_blocks, outer_modules[1] if index == stage_count - 1 else None
        )

    def _check_coverage(self, model: nn.Module, covering_modules: Sequence[nn.Module]) -> None:
        """Raises InputError if a parameter of the model is in none of these modules. Modules that are not part of the model do
        not count."""
        model_modules = {id(module) for module in model.modules()}
        covered_parameters = {
            id(parameter)
            for covered_module in covering_modules
            for module in covered_module.modules()
            if id(module) in model_modules
            for parameter in module.parameters(recurse=False)
        }
        if missing := next(
            (name for name, parameter in model.named_parameters() if id(parameter) not in covered_parameters), None
        ):
            raise InputError(
                f"{self._plugin.file}: pipeline(): the parameter {missing} is neither before the blocks, in a block nor behind "
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

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs if self.before is None else self.before(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if self.behind is None else self.behind(hidden)


def _find_divided_size(layer: Any, style: str) -> int:
    """The size of the dimension of a linear layer that is divided over the ranks. style: `columns` or `rows`."""
    return int(layer.out_features if style == "columns" else layer.in_features)


def split_layers(plugin: OwnModel, block: nn.Module, ranks: int) -> dict[str, str]:
    """Call the function `tensor_parallel` of the file: name of each split linear layer -> `columns` or `rows`.

    The function may change the block. Raises InputError if it returns anything else, or if the size of a layer cannot be
    divided by the number of ranks.
    """
    styles = plugin.call_function("tensor_parallel", block, ranks)
    if not isinstance(styles, dict) or not styles or not all(style in STYLES for style in styles.values()):
        raise InputError(
            f"{plugin.file}: tensor_parallel() returned {styles!r:.80}. Allowed: 'columns' or 'rows' for each layer that is "
            "split, such as {'up': 'columns', 'down': 'rows'}."
        )
    linear_layers = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    for name, style in styles.items():
        if name not in linear_layers:
            raise InputError(
                f"{plugin.file}: tensor_parallel(): a block has no linear layer {name!r:.40}. "
                f"Allowed: {', '.join(linear_layers) or 'none'}."
            )
        if _find_divided_size(linear_layers[name], style) % ranks:
            size = _find_divided_size(linear_layers[name], style)
            raise InputError(
                f"{plugin.file}: tensor_parallel(): the {size} {style} of the layer {name} cannot be divided by {ranks}."
            )
    return styles
