"""Counts in a user's model what the planner needs to know: operations, and the bytes that autograd saves for backward."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardlab.plugins.plugin_kind import ModelCounts, SavedBytes
from trainers import cross_entropy
from trainers.model.cast_weights import cast_weights
from trainers.model.counted_flops import FlopCount, count_block_parameters
from trainers.rehearsal.fake_tensors import make_fake, use_fake_tensors
from trainers.task import Batch, Task
from trainers.tasks.configured import CausalTask

# Gets a block, which it may change, and a number of ranks; returns `columns` or `rows` for each linear layer that is split.
Styles = Callable[[nn.Module, int], dict[str, str]]
# The dtype of the copies of weights, and whether autocast is used.
PRECISIONS = {"fp32": (None, False), "bf16": (torch.bfloat16, False), "bf16-autocast": (None, True)}
BATCH_ITEMS = 2  # the items of a batch; BatchNorm cannot train with fewer


def count_model(
    task: Task, model: nn.Module, flop_count: FlopCount, shallow_task: Task, styles: Styles, tensor_degrees: Sequence[int]
) -> ModelCounts:
    """What was counted in the model of a task.

    shallow_task: the task; if all blocks are equal, it may have fewer of them. styles, tensor_degrees: how the layers of a
    block are split, over which numbers of tensor-parallel ranks; no tensor_degrees: they cannot be split.
    """
    blocks, modules, config = list(task.blocks(model)), list(model.modules()), getattr(task, "config", None)
    block_modules = {module for block in blocks for module in block.modules()}
    first_block = modules.index(blocks[0]) if blocks else len(modules)
    front_weights, back_weights = (
        {
            weight
            for module in module_group
            if module not in block_modules
            for weight in module._parameters.values()
            if weight is not None
        }
        for module_group in (modules[:first_block], modules[first_block:])
    )
    end_parameter_counts = [
        sum(weight.numel() for weight in module_group if weight.requires_grad)
        for module_group in (front_weights, back_weights, front_weights & back_weights)
    ]
    tp_degree = next(iter(tensor_degrees), 1)
    split_styles = [*styles(copy.deepcopy(blocks[0]), tp_degree).values()] if tensor_degrees else []
    saved_by_precision = dict[str, SavedBytes]()
    for precision, (cast, autocast) in PRECISIONS.items():
        with suppress(Exception):  # a model may be unable to compute without real data, or in 16 bits
            saved_by_precision[precision] = _count_saved_bytes(shallow_task, cast, styles, tp_degree, autocast=autocast)
    return ModelCounts(
        kind="transformer" if flop_count.attention_flops and (config is None or hasattr(config, "num_attention_heads"))
        else "convolution" if any(isinstance(module, nn.Conv2d) for module in block_modules) else "unknown",
        block_flops=flop_count.block_flops,
        attention_flops=flop_count.attention_flops,
        other_flops=max(0.0, flop_count.flops * task.units_per_item - flop_count.block_flops),
        vocabulary=getattr(config, "vocab_size", 0),
        width=getattr(config, "hidden_size", None),
        saved=saved_by_precision,
        end_parameters=(end_parameter_counts[0], end_parameter_counts[1], end_parameter_counts[2]),
        reductions=(split_styles.count("rows"), split_styles.count("columns")) if split_styles else None,
        is_causal=isinstance(task, CausalTask),
    )  # fmt: skip


def _count_saved_bytes(task: Task, cast: torch.dtype | None, styles: Styles, tp_degree: int, *, autocast: bool) -> SavedBytes:
    """What the model of a task saves on tensors without memory. cast, autocast: as in PRECISIONS. tp_degree: number of ranks
    over which blocks are split by `styles`; 1: they cannot be split. Raises the error of the model if it cannot compute."""
    one_item = task.fetch(np.arange(1), torch.device("cpu"))
    # Without the kernel that never writes the matrix of attention, a CPU saves more than a GPU, so nothing is counted.
    # Chunks of logits change no count, and take time.
    with (
        use_fake_tensors() as mode,
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        patch.object(cross_entropy, "CHUNK_LOGITS", sys.maxsize),
    ):
        model = make_fake(task.model(), mode).train()
        count_pass = partial(_count_saved_of_pass, task, model, one_item, cast=cast, autocast=autocast)
        once_bytes, twice_bytes, split_bytes = count_pass(BATCH_ITEMS), count_pass(2 * BATCH_ITEMS), 0.0
        copy_bytes = max(0.0, 2 * once_bytes["block"] - twice_bytes["block"])
        if tp_degree > 1:
            for block in dict.fromkeys(task.blocks(model)):
                _narrow_block(block, styles(block, tp_degree), tp_degree)
            # autocast copies only weights that are split
            split_bytes = max(
                0.0, ((once_bytes["block"] - count_pass(BATCH_ITEMS)["block"]) / (1 - 1 / tp_degree) - copy_bytes) / BATCH_ITEMS
            )
    bytes_per_item = {name: (twice_bytes[name] - size) / BATCH_ITEMS for name, size in once_bytes.items()}
    return SavedBytes(
        block_whole=bytes_per_item["block"] - split_bytes,
        block_split=split_bytes,
        block_input=bytes_per_item["hidden"],
        head=bytes_per_item["outside"],
        logits=bytes_per_item["logits"],
        weights=copy_bytes,
        head_weights=max(0.0, 2 * once_bytes["outside"] - twice_bytes["outside"]),
        # the targets of a language model are its inputs, one position later
        inputs=sum({part.untyped_storage().data_ptr(): part.nbytes for part in (one_item.inputs, one_item.targets)}.values()),
        block_squared=bytes_per_item["squared"],
    )


def _narrow_block(block: nn.Module, style_by_layer: dict[str, str], tp_degree: int) -> None:
    """Replace the split layers of a block by those that one of the ranks has."""
    for name, style in style_by_layer.items():
        layer: Any = block.get_submodule(name)
        input_width, output_width = layer.in_features, layer.out_features
        layer_sizes = (input_width // tp_degree, output_width) if style == "rows" else (input_width, output_width // tp_degree)
        block.set_submodule(name, nn.Linear(*layer_sizes, bias=layer.bias is not None))


def _count_saved_of_pass(
    task: Task, model: nn.Module, example: Batch, item_count: int, *, cast: torch.dtype | None, autocast: bool
) -> dict[str, float]:
    """The bytes that autograd saves of a batch of `item_count` items. Views of one storage count once; weights and the batch do
    not count. Returns the bytes in a block, the part of them in tensors for pairs of positions, and the bytes outside of
    blocks, of the input of a block, and of the logits."""
    blocks = list(dict.fromkeys(task.blocks(model)))
    inputs, targets = (torch.empty(item_count, *part.shape[1:], dtype=part.dtype) for part in (example.inputs, example.targets))
    places, hidden = [len(blocks)], 0  # the last place is that outside of blocks
    saved_tensors: dict[int, tuple[torch.Tensor, int]] = {}  # by the number of the storage, which lives as long as the tensor

    def enter(place: int, _: nn.Module, arguments: Any, keyword_arguments: Any) -> None:
        nonlocal hidden
        places.append(place)
        hidden = next(value.nbytes for value in (*arguments, *keyword_arguments.values()) if isinstance(value, torch.Tensor))

    def leave(*_: Any) -> None:
        places.pop()

    def record_saved_tensor(tensor: torch.Tensor) -> torch.Tensor:
        saved_tensors.setdefault(tensor.untyped_storage()._cdata, (tensor, places[-1]))
        return tensor

    hooks = [block.register_forward_pre_hook(partial(enter, place), with_kwargs=True) for place, block in enumerate(blocks)]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    with cast_weights(model, cast), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        tensors = [value for module in model.modules() for value in (*module._parameters.values(), *module._buffers.values())]
        ignored_storages = {value.untyped_storage()._cdata for value in (inputs, targets, *tensors) if value is not None}
        with saved_tensors_hooks(record_saved_tensor, lambda tensor: tensor):
            batch = Batch(inputs.to(cast) if cast is not None and inputs.is_floating_point() else inputs, targets)
            outputs = task.outputs(model, batch)
            task.criterion(outputs, targets)
    for hook in hooks:
        hook.remove()
    sizes, squared, logit_bytes = [0.0] * (len(blocks) + 1), [0.0] * (len(blocks) + 1), outputs.nbytes
    for tensor, place in (entry for storage_number, entry in saved_tensors.items() if storage_number not in ignored_storages):
        sizes[place] += tensor.untyped_storage().nbytes()
        squared[place] += tensor.untyped_storage().nbytes() if tensor.ndim == 4 and tensor.shape[-1] == tensor.shape[-2] else 0
        if place == len(blocks) and tensor.numel() == outputs.numel():
            logit_bytes = max(logit_bytes, tensor.nbytes)
    # The first block saves what all blocks share. If the blocks are equal, the last one stands for each of them.
    are_equal = len(set(count_block_parameters(blocks))) == 1
    indexes = [len(blocks) - 1] if are_equal else range(len(blocks))
    block, block_squared = (sum(counts[place] for place in indexes) / max(1, len(indexes)) for counts in (sizes, squared))
    outside_bytes = sum(sizes) - block * len(blocks)
    return {"block": block, "squared": block_squared, "outside": outside_bytes, "hidden": hidden, "logits": logit_bytes}
