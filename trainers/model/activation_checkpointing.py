"""Activation checkpointing: some blocks do not keep activations from forward to backward, but recompute them in backward.

After Chen et al., Training deep nets with sublinear memory cost, 2016. `list_block_units` also says which blocks FSDP and ZeRO
shard as units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.errors import InputError

if TYPE_CHECKING:
    from trainers.task import Task

IN_CHAIN = "_at:"  # prefix of a block's name in a `BlockChain`; the block's name in the bare model follows, with : for each dot


class BlockChain(nn.Module):
    """Blocks that are checkpointed as one unit.

    Each block gets the hidden state of the block before it, and all other arguments of `forward`.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, block in blocks:
            self.add_module(IN_CHAIN + name.replace(".", ":"), block)

    def forward(self, hidden: torch.Tensor, *arguments: Any, **keyword_arguments: Any) -> torch.Tensor:
        for block in self.children():
            hidden = block(hidden, *arguments, **keyword_arguments)
        return hidden


class MovedBlock(nn.Module):
    """A placeholder for a block that was moved into a chain: `forward` returns its first argument unchanged."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


def checkpoint_blocks(setting: str, task: Task, model: nn.Module) -> None:
    """Apply activation checkpointing to a model's blocks, in place.

    setting: `full`, `every-K` or `segments-N`, as in `Cell.activation_checkpointing`. Raises InputError if there are more
    segments than blocks.
    """
    blocks = list(task.blocks(model))
    mode, _, interval_text = setting.partition("-")
    if mode == "segments":
        _chain_segments(model, blocks, int(interval_text))
        return
    interval = 1 if mode == "full" else int(interval_text)
    chosen_ids = {id(block) for index, block in enumerate(blocks) if index % interval == 0}
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=_wrap_module, check_fn=lambda module: id(module) in chosen_ids)


def count_checkpointed_blocks(model: nn.Module) -> int:
    """The number of blocks and chains of a model whose activations are recomputed in backward."""
    return sum(isinstance(module, CheckpointWrapper) for module in model.modules())


def list_block_units(task: Task, model: nn.Module) -> list[nn.Module]:
    """The blocks of a model. A chain counts as one block; `MovedBlock` placeholders are left out."""
    return [block for block in task.blocks(model) if not isinstance(block, MovedBlock)]


def _chain_segments(model: nn.Module, blocks: Sequence[nn.Module], segment_count: int) -> None:
    if segment_count > len(blocks):
        raise InputError(
            f"activation_checkpointing: found segments-{segment_count} for {len(blocks)} blocks. "
            f"Allowed: up to segments-{len(blocks)}."
        )
    name_by_id = {id(module): name for name, module in model.named_modules()}
    segment_bounds = [len(blocks) * index // segment_count for index in range(segment_count + 1)]
    # The last segment is not checkpointed: backward begins with it, so that recomputing its activations would save no memory.
    for begin, end in pairwise(segment_bounds[:-1]):
        segment = blocks[begin:end]
        model.set_submodule(
            name_by_id[id(segment[0])], _wrap_module(BlockChain([(name_by_id[id(block)], block) for block in segment]))
        )
        for block in segment[1:]:
            model.set_submodule(name_by_id[id(block)], MovedBlock())


def _wrap_module(module: nn.Module) -> nn.Module:
    batch_norms = [inner for inner in module.modules() if isinstance(inner, _BatchNorm)]
    if not batch_norms:
        return checkpoint_wrapper(module)

    def make_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _keep_statistics(batch_norms)

    return checkpoint_wrapper(module, context_fn=make_contexts)


@contextmanager
def _keep_statistics(batch_norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Keep BatchNorm's running statistics unchanged in the `with` block. Otherwise, recomputation would add the same batch to
    the statistics a second time."""
    momenta = [module.momentum for module in batch_norms]
    for module in batch_norms:
        module.momentum = 0.0
    try:
        yield
    finally:
        for module, momentum in zip(batch_norms, momenta):
            module.momentum = momentum
