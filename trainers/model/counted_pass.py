"""Counts what a model computes and what autograd saves in a pass, in its blocks and outside of them.

The pass runs on tensors without memory: on torch's meta device, or on fake tensors (trainers/rehearsal). Of equal blocks two
run, and each further block passes on its input.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.flop_counter import sdpa_flop_count

from trainers import cross_entropy
from trainers.model.cast_weights import cast_weights
from trainers.model.counted_flops import OperationCounter
from trainers.model.precision import ALIGNED
from trainers.task import Batch

if TYPE_CHECKING:
    from trainers.task import Task

RUN_BLOCKS = 2  # of equal blocks; tensors that all blocks share, such as masks, are saved in the first block only
ITEMS = 2  # items of a batch; BatchNorm cannot train with fewer
OUTSIDE = -1  # the number of the place outside of blocks
PASS_FLOPS = 3  # forward and backward, divided by forward: backward has two matrix products for each one of forward


class PassCount(NamedTuple):
    """What a micro-batch needs. Operations are those of forward and backward, bytes are those that autograd saves."""

    block_flops: float
    attention_flops: float
    """The part of block_flops in torch's scaled_dot_product_attention."""
    other_flops: float
    """The operations outside of blocks."""
    unaligned_flops: float
    """The part of other_flops in products with a weight one of whose sizes is no multiple of ALIGNED."""
    convolution_share: float
    """The share of convolutions in all operations."""
    saved_in_blocks: float
    """Bytes of tensors that blocks save for backward, without weights and the batch. Views of one storage count once."""
    saved_outside: float
    """The same outside of blocks, with tensors that several blocks share."""
    hidden: float
    """The mean number of elements of a block's input."""
    width: int
    """The size of the last dimension of the input of the last block; 0: there is no block."""
    logits: int
    """The number of elements of the model's outputs."""
    largest_behind: int
    """The number of elements of the largest product behind the blocks, or of the model's outputs."""
    ends: tuple[int, int, int]
    """The numbers of parameters that are used before the blocks, behind them, and in both places."""
    unused: list[str]
    """The names of parameters that got no gradient."""


def count_flops(task: Task, items: Batch) -> float:
    """Floating-point operations of forward and backward for one unit, as `counted_flops.SOURCE` says. items: real items, whose
    shapes are used. If the model cannot compute without real data, the error of the model is raised."""
    with torch.device("meta"):
        model = task.model().train()
    count = count_pass(task, model, make_batch(items, ITEMS), backward=True)
    return (count.block_flops + count.other_flops) / ITEMS / task.units_per_item


def count_task_flops(task: Task) -> float | None:
    """As `count_flops`; None if the model cannot compute without real data."""
    try:
        return count_flops(task, task.fetch(np.arange(1), torch.device("cpu"))) or None
    except Exception:  # noqa: BLE001 - a library's model may raise anything on the meta device; `jobs plan` shows the reason
        return None


def make_batch(items: Batch, size: int, device: str = "meta") -> Batch:
    """A batch of `size` items without values, of the shape and type of real items."""
    parts = (items.inputs, items.targets)
    return Batch(*(torch.empty(size, *part.shape[1:], dtype=part.dtype, device=device) for part in parts))


def count_pass(
    task: Task,
    model: nn.Module,
    batch: Batch,
    *,
    cast: torch.dtype | None = None,
    autocast: bool = False,
    backward: bool = False,
) -> PassCount:
    """Count one pass of a model.

    cast: the dtype to which weights are cast (trainers/model/cast_weights.py). autocast: whether to use torch's autocast to
    bf16. backward: whether to run backward too; if not, other_flops and unused are not valid.
    """
    counter = _PassCounter(model, task.blocks(model))
    fused_attention = partial(counter.attend, functional.scaled_dot_product_attention)
    inputs = batch.inputs.to(cast) if cast is not None and batch.inputs.is_floating_point() else batch.inputs
    with (
        cast_weights(model, cast),
        counter,
        _replace(functional, "scaled_dot_product_attention", fused_attention),
        _replace(cross_entropy, "CHUNK", sys.maxsize),  # the size of a chunk changes no count
    ):
        counter.ignore(batch.inputs, batch.targets)
        with saved_tensors_hooks(counter.save, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = task.outputs(model, Batch(inputs, batch.targets))
            loss = task.criterion(outputs, batch.targets)
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
    return counter.summarize(outputs.numel())


class _PassCounter(OperationCounter):  # type: ignore[no-untyped-call]
    """Counts the operations and the saved bytes of each block, and those outside of blocks."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self._model, self._blocks = model, list(dict.fromkeys(blocks))
        self._structures = [(str(block), *(weight.shape for weight in block.parameters())) for block in self._blocks]
        self._representatives = list(range(len(self._blocks)))  # for each block, the number of the block with equal counts
        self._equal = defaultdict[Any, list[int]](list)  # the numbers of equal blocks that ran
        self._forward_flops = [0] * len(self._blocks)
        self._attention_flops, self._saved = ([0] * (len(self._blocks) + 1) for _ in range(2))  # the last entry: OUTSIDE
        self._place, self._ran = OUTSIDE, set[int]()
        self._before, self._behind = set[nn.Parameter](), set[nn.Parameter]()  # the parameters that are used outside of blocks
        self._hidden = [0] * len(self._blocks)
        self._width = self._largest_behind = self._unaligned = 0
        self._storages: dict[int, torch.Tensor] = {}  # the tensors stay alive, so that no other storage gets the same id

    def __enter__(self) -> _PassCounter:
        inner = {module for block in self._blocks for module in block.modules()}
        self._hooks = [
            module.register_forward_pre_hook(self._note_use) for module in self._model.modules() if module not in inner
        ]
        for number, block in enumerate(self._blocks):
            block.forward = partial(self._run_block, number, block.forward)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _note_use(self, module: nn.Module, _: Any) -> None:
        """The hook that is called before a module outside of blocks computes."""
        used = self._behind if self._ran else self._before
        used |= {weight for weight in module._parameters.values() if weight is not None}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        for block in self._blocks:
            del block.forward

    def _run_block(self, number: int, forward: Any, *arguments: Any, **named: Any) -> Any:
        values = (*arguments, *named.values())
        hidden: Any = next((value for value in values if isinstance(value, torch.Tensor)), None)
        equal = self._equal[self._structures[number], *(getattr(value, "shape", None) for value in values)]
        if len(equal) == RUN_BLOCKS:
            self._representatives[number] = equal[-1]
            return hidden
        self._place, flops_before = number, self.flops
        outputs = forward(*arguments, **named)
        self._place, self._hidden[number], self._width = OUTSIDE, hidden.numel(), hidden.shape[-1]
        self._forward_flops[number] += self.flops - flops_before
        self._ran.add(number)
        if isinstance(outputs, torch.Tensor) and (outputs.shape, outputs.dtype) == (hidden.shape, hidden.dtype):
            equal.append(number)
            for earlier in equal:
                self._representatives[earlier] = number
        return outputs

    def count(self, operator: Any, arguments: Any, outputs: Any, flops: int) -> None:
        super().count(operator, arguments, outputs, flops)
        if self._place != OUTSIDE or torch._C._current_graph_task_id() != -1:  # in a block, or in backward
            return
        if self._ran:
            self._largest_behind = max(self._largest_behind, outputs.numel())
        if operator in (torch.ops.aten.mm, torch.ops.aten.addmm) and any(size % ALIGNED for size in arguments[-1].shape):
            self._unaligned += PASS_FLOPS * flops

    def attend(
        self, attention: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *options: Any, **named: Any
    ) -> Any:
        """Replaces torch's scaled_dot_product_attention, which is `attention`, because a CPU uses other kernels than a GPU."""
        if query.ndim != 4:
            return attention(query, key, value, attn_mask, *options, **named)
        forward_flops: int = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
        self._attention_flops[self._place] += PASS_FLOPS * forward_flops
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
        parts = (part if part is None else part.to(dtype) for part in (query, key, value, attn_mask))
        return _FusedAttention.apply(*parts)  # type: ignore[no-untyped-call]

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Count neither these tensors nor the weights and buffers of the model, if autograd saves them."""
        held = (
            tensor for module in self._model.modules() for tensor in (*module._parameters.values(), *module._buffers.values())
        )
        self._storages = {tensor.untyped_storage()._cdata: tensor for tensor in (*tensors, *held) if tensor is not None}

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook that autograd calls with a tensor that it saves for backward."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = tensor
            self._saved[self._place] += storage.nbytes()
        return tensor

    def summarize(self, logits: int) -> PassCount:
        def sum_blocks(counts: Sequence[int], blocks: Collection[int]) -> int:
            return sum(counts[self._representatives[block]] for block in blocks)

        def count_parameters(weights: Collection[nn.Parameter]) -> int:
            return sum(weight.numel() for weight in weights if weight.requires_grad)

        in_blocks = {weight for block in self._blocks for weight in block.parameters()}
        front, back = self._before - in_blocks, self._behind - in_blocks
        outside = {*self._model.parameters()} - in_blocks
        every, attention_flops = range(len(self._blocks)), sum_blocks(self._attention_flops, range(len(self._blocks)))
        skipped = {weight for block in set(every) - self._ran for weight in self._blocks[block].parameters()}
        ran_flops = PASS_FLOPS * sum(self._forward_flops)
        return PassCount(
            block_flops=PASS_FLOPS * sum_blocks(self._forward_flops, every) + attention_flops,
            attention_flops=attention_flops,
            other_flops=max(0, self.flops - ran_flops) + self._attention_flops[OUTSIDE],
            unaligned_flops=self._unaligned,
            convolution_share=self.convolutions / max(1, self.flops),
            saved_in_blocks=sum_blocks(self._saved, every),
            saved_outside=sum(self._saved) - sum_blocks(self._saved, self._ran),
            hidden=sum_blocks(self._hidden, every) / max(1, len(every)),
            width=self._width,
            logits=logits,
            largest_behind=max(logits, self._largest_behind),
            ends=(count_parameters(front | (outside - back)), count_parameters(back), count_parameters(front & back)),
            unused=[
                name
                for name, weight in self._model.named_parameters()
                if weight.requires_grad and weight.grad is None and weight not in skipped
            ],
        )


class _FusedAttention(torch.autograd.Function):
    """Saves what attention kernels of GPUs save, which never write the attention matrix (Dao et al., FlashAttention, 2022)."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        items, heads, positions, _ = query.shape
        output = torch.empty_like(query)  # in the layout of the query
        if value.shape[-1] != query.shape[-1]:
            output = query.new_empty(items, positions, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(items, heads, positions, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if part is None else torch.empty_like(part) for part in ctx.saved_tensors[:4])


@contextmanager
def _replace(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module in the `with` block."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
