"""Counts in a user's model what the planner needs: operations, and the tensors that autograd saves (ModelCounts)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shardlab.matrix.cell import Precision
from shardlab.plugins.plugin_kind import ModelCounts, SavedCount
from trainers.model.counted_pass import ITEMS, PassCount, count_pass, make_batch
from trainers.rehearsal.fake_tensors import fake_tensors, make_fake
from trainers.task import Batch, Task

LEAST_SQUARED = 0.01  # a smaller share that grows with the square of the length comes from rounding
MOST_CONVOLUTIONS = 0.5  # a model with a larger share of convolutions in its operations is a convolutional network


class ModelSplit(NamedTuple):
    """How tensor parallelism splits the blocks of a model."""

    styles: Callable[[nn.Module, int], dict[str, str]]
    """Gets a block, which it may change, and a number of ranks. Returns `columns` or `rows` for each linear layer that is
    split, by its name in the block."""
    ranks: int
    """A possible number of ranks, from 2."""
    reductions: tuple[int, int]
    """The numbers of layers of a block that are split by rows and by columns."""

    def narrow_block(self, block: nn.Module) -> None:
        """Replace the layers of a block by the layers that one of the ranks has."""
        for name, style in self.styles(block, self.ranks).items():
            layer: Any = block.get_submodule(name)
            inputs, outputs = layer.in_features, layer.out_features
            sizes = (inputs // self.ranks, outputs) if style == "rows" else (inputs, outputs // self.ranks)
            block.set_submodule(name, nn.Linear(*sizes, bias=layer.bias is not None))


class _Passes(NamedTuple):
    """The counts of passes in one precision."""

    once: PassCount
    """A batch of ITEMS items."""
    twice: PassCount
    """A batch of twice as many items."""
    short_once: PassCount
    """As `once`, with shorter sequences."""
    short_twice: PassCount
    narrow: PassCount
    """As `once`, on a tensor-parallel rank."""


def count_model(task: Task, shorter: Task | None = None, split: ModelSplit | None = None) -> tuple[ModelCounts, list[str]]:
    """Count in the model of a task. Returns (the counts; the names of parameters that get no gradient).

    shorter: the same task with shorter sequences; None: the length of an item is fixed. split: None if the blocks cannot be
    split. If the model cannot compute without real data, the error of the model is raised.
    """
    items = [(each, each.fetch(np.arange(1), torch.device("cpu"))) for each in (task, shorter or task)]
    with torch.device("meta"):
        model = task.model().train()
        passes: dict[Precision, _Passes] = {"fp32": _count_passes(items, model, split, backward=True)}
        with suppress(Exception):  # a model may be unable to compute in 16 bits
            passes["bf16"] = _count_passes(items, task.model().train(), split, cast=torch.bfloat16)
    with fake_tensors() as mode, suppress(Exception):  # autocast does not know the meta device
        model = make_fake(task.model(), mode).train()
        passes["bf16-autocast"] = _count_passes(items, model, split, device="cpu", autocast=True)
    whole, short = passes["fp32"].once, passes["fp32"].short_once
    ratio = (shorter or task).units_per_item / task.units_per_item
    attention_flops = whole.attention_flops if shorter is None else _find_squared(whole.block_flops, short.block_flops, ratio)

    def fit(name: str) -> dict[Precision, SavedCount]:
        ranks = 1 if split is None else split.ranks
        return {precision: _fit_saved(name, counts, ratio, ranks) for precision, counts in passes.items()}

    has_convolutions = whole.convolution_share > MOST_CONVOLUTIONS
    counts = ModelCounts(
        kind="transformer" if attention_flops else "convolution" if has_convolutions else "unknown",
        block_flops=whole.block_flops / ITEMS,
        attention_flops=attention_flops / ITEMS,
        other_flops=whole.other_flops / ITEMS,
        unaligned_flops=whole.unaligned_flops / ITEMS,
        saved_in_blocks=fit("saved_in_blocks"),
        saved_outside=fit("saved_outside"),
        hidden=whole.hidden / ITEMS,
        width=whole.width,
        logits=whole.logits // ITEMS,
        largest_behind=whole.largest_behind // ITEMS,
        inputs=items[0][1].inputs.nbytes + items[0][1].targets.nbytes,
        ends=whole.ends,
        reductions=None if split is None else split.reductions,
    )
    return counts, whole.unused


def _count_passes(
    items: Sequence[tuple[Task, Batch]],
    model: nn.Module,
    split: ModelSplit | None,
    *,
    backward: bool = False,
    device: str = "meta",
    **precision: Any,
) -> _Passes:
    """Count passes of a model, whose split layers are replaced. items: the task with an item, and the task with shorter
    sequences; both may be the same. backward: whether the first pass has backward. precision: arguments of `count_pass`."""
    (task, item), (shorter, short_item) = items
    once = count_pass(task, model, make_batch(item, ITEMS, device), backward=backward, **precision)
    twice = count_pass(task, model, make_batch(item, 2 * ITEMS, device), **precision)
    short_once, short_twice = once, twice
    if shorter is not task:
        short_once, short_twice = (
            count_pass(shorter, model, make_batch(short_item, size, device), **precision) for size in (ITEMS, 2 * ITEMS)
        )
    if split is None:
        return _Passes(once, twice, short_once, short_twice, once)
    for block in dict.fromkeys(task.blocks(model)):
        split.narrow_block(block)
    narrow = count_pass(task, model, make_batch(item, ITEMS, device), **precision)
    return _Passes(once, twice, short_once, short_twice, narrow)


def _fit_saved(name: str, counts: _Passes, ratio: float, ranks: int) -> SavedCount:
    """Find of what the saved bytes consist. name: a field of PassCount. ratio: the shorter length, as a share of the length.
    ranks: the number of ranks of which `narrow` is one."""
    once, twice, short_once, short_twice, narrow = (float(getattr(count, name)) for count in counts)
    per_item, fixed = (twice - once) / ITEMS, max(0.0, 2 * once - twice)
    squared = _find_squared(per_item, (short_twice - short_once) / ITEMS, ratio)
    # autocast copies only the weights that are split
    narrow_per_item = (narrow - fixed / ranks) / ITEMS
    split_share = (1 - narrow_per_item / per_item) / (1 - 1 / ranks) if ranks > 1 and per_item else 0.0
    return SavedCount(per_item, squared, fixed, min(1.0, max(0.0, split_share)))


def _find_squared(amount: float, short_amount: float, ratio: float) -> float:
    """The part of an amount that grows with the square of the length, if the rest grows with the length. short_amount: the
    amount at `ratio` times the length."""
    if ratio == 1:
        return 0.0
    squared = (ratio * amount - short_amount) / (ratio - ratio**2)
    return squared if squared > LEAST_SQUARED * amount else 0.0
