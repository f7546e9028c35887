"""Splits a model by the tensor-parallel plan that transformers has for its blocks, if this plan is sufficient.

The plan of transformers names linear layers whose outputs (colwise) or inputs (rowwise) are divided. It is used only if a block
has two parts that end with a rowwise layer, attention and MLP, and if these parts have no other parameters. Other parameters
would get only a part of their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainers.plans.plan import POSITIONS, ModelPlan, add_gathering_hook

COLUMNS, ROWS = "colwise", "rowwise"


class LayerSplit(NamedTuple):
    """How a block is split."""

    columns: tuple[str, ...]
    """The names of the layers that are split by columns."""
    rows: tuple[str, ...]
    """The names of the layers that are split by rows."""
    degrees: tuple[int, ...]
    """The possible numbers of ranks, from 2."""
    vocabulary_layers: tuple[str, str] | None = None
    """As in `ModelPlan`."""

    def map_styles(self, _: nn.Module, __: int) -> dict[str, str]:
        """`columns` or `rows` by the name of each split layer, for any block and number of ranks."""
        return dict.fromkeys(self.columns, "columns") | dict.fromkeys(self.rows, "rows")


def derive_split(model: nn.Module, blocks: Sequence[nn.Module], config: Any) -> LayerSplit | str:
    """How the blocks of a model can be split, or, as the end of a sentence, why they cannot be split.

    config: the configuration of the model, as an object of transformers.
    """
    tensor_plan = getattr(config, "base_model_tp_plan", None)
    if not tensor_plan or not blocks:
        return "transformers has no tensor-parallel plan for its blocks"
    name_by_id = {id(module): name for name, module in model.named_modules()}
    name_prefix = f"{model.base_model_prefix}." if name_by_id[id(blocks[0])].startswith(f"{model.base_model_prefix}.") else ""
    style_by_layer = {
        key.partition(".*.")[2]: style
        for key, style in tensor_plan.items()
        if ".*." in key and name_by_id[id(blocks[0])].removeprefix(name_prefix).startswith(f"{key.partition('.*.')[0]}.")
    }
    if unsupported_style := next((style for style in style_by_layer.values() if style not in (COLUMNS, ROWS)), None):
        return f"its plan in transformers has layers that are {unsupported_style}, which is not supported here"
    columns = tuple(name for name, style in style_by_layer.items() if style == COLUMNS)
    rows = tuple(name for name, style in style_by_layer.items() if style == ROWS)
    if len(rows) != ModelPlan.forward_reductions or not columns:
        return "its plan in transformers is not that of attention and an MLP"
    for block in blocks:
        layer_ids = {id(part) for name in style_by_layer if isinstance(part := _find_module(block, name), nn.Linear)}
        sections_by_id = {
            id(part): part for name in style_by_layer if (part := _find_module(block, name.rpartition(".")[0])) is not None
        }
        parameter_holders = {id(module) for part in sections_by_id.values() for module in part.modules() if module._parameters}
        if len(layer_ids) < len(style_by_layer) or parameter_holders != layer_ids:
            return "its plan in transformers leaves out layers of its blocks"
    head_counts = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    divided_sizes = [_find_linear(blocks[0], name).out_features for name in columns] + [
        _find_linear(blocks[0], name).in_features for name in rows
    ]
    common_divisor = math.gcd(*divided_sizes, *(size for size in head_counts if isinstance(size, int)))
    degrees = tuple(ranks for ranks in range(2, common_divisor + 1) if common_divisor % ranks == 0)
    return LayerSplit(columns, rows, degrees, _find_vocabulary_layers(model, name_by_id, config))


class DerivedPlan(ModelPlan):
    """A plan with the split from `derive_split`, without pipeline stages. positions, width: the shape of a hidden state."""

    def __init__(self, positions: int, width: int, split: LayerSplit) -> None:
        self.hidden_shape, self._split, self.backward_reductions = (positions, width), split, len(split.columns)
        self.vocabulary_layers = split.vocabulary_layers

    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        layout = Shard(POSITIONS) if sequence else Replicate()
        styles: dict[str, Any] = {name: ColwiseParallel() for name in self._split.columns}
        styles |= {name: RowwiseParallel(output_layouts=layout) for name in self._split.rows}
        parallelize_module(block, mesh, styles, src_data_rank=None)  # None: weights are not broadcast, because they are equal
        if not sequence:
            return []
        for name in self._split.rows:
            add_gathering_hook(block.get_submodule(name.rpartition(".")[0]), mesh)
        return [parameter for parameter in block.parameters() if not isinstance(parameter, DTensor)]

    def build_stage(self, model: nn.Module, index: int, stage_count: int) -> nn.Module:
        raise AssertionError("refused at plan time: nobody wrote how to divide the model into stages")


def _find_vocabulary_layers(model: Any, name_by_id: dict[int, str], config: Any) -> tuple[str, str] | None:
    """The names of the embedding of tokens and of the head, if they compute nothing but what torch's layers compute, and have
    the sizes of the configuration. name_by_id: the name of each module by its id."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        return None
    sizes = (getattr(config, "vocab_size", None), getattr(config, "hidden_size", None))
    is_usual = tuple(embedding.weight.shape) == tuple(head.weight.shape) == sizes
    return (name_by_id[id(embedding)], name_by_id[id(head)]) if is_usual else None


def _find_module(block: nn.Module, name: str) -> nn.Module | None:
    try:
        return block.get_submodule(name)
    except AttributeError:
        return None


def _find_linear(block: nn.Module, name: str) -> nn.Linear:
    layer = block.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer
