"""Deferred initialization: the model is built on the meta device, and rank 0 broadcasts the weights block by block.

Each block is sharded before the next block is sent. A rank therefore never holds more than its shards plus one whole block, or
plus the weights outside the blocks. FSDP1's `sync_module_states` does the same, but torch 2.13 refuses it on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


class DeferredModel:
    """A task's model on torch's meta device (`model`). `fill_module` allocates its modules and broadcasts their weights.

    Rank 0 initializes the weights in host memory and frees each weight after it has been sent.
    """

    def __init__(self, task: Task, ranks: Ranks, dtype: torch.dtype) -> None:
        """dtype: the dtype of the weights. Rank 0 initializes them in fp32 and rounds them to this dtype."""
        with torch.device("meta"):
            self.model = task.model().to(dtype)
        self._device = ranks.device
        # The keys are meta tensors and not modules: sharding replaces modules, and a replaced module that is a key here would
        # keep its whole weights in memory.
        self._initial_values: dict[torch.Tensor, torch.Tensor] = {}
        if ranks.rank == 0:
            for meta_module, initialized_module in zip(self.model.modules(), task.model().modules(), strict=True):
                self._initial_values |= {
                    tensor: getattr(initialized_module, name).detach() for name, tensor in _list_direct_tensors(meta_module)
                }
        holder_counts = Counter(tensor for module in self.model.modules() for _, tensor in _list_direct_tensors(module))
        # Only tied weights are kept here, so that they stay tied (`Module.to_empty` would untie them). Other weights are not
        # kept: after sharding, whole weights would stay in memory.
        self._tied_tensors = {tensor: torch.empty(0) for tensor, count in holder_counts.items() if count > 1}
        self._sent_tensors: set[torch.Tensor] = set()

    def fill_module(self, outer: nn.Module, *, keep: bool = True) -> None:
        """Allocate and fill the weights of a module and of its submodules; tensors that have memory are not changed.

        A collective: all ranks call it for the same modules in the same order. A rank that does not need the module, because
        another pipeline stage has it, calls it with `keep` false; the module then stays on the meta device.
        """
        for module in outer.modules():
            self.fill_own_tensors(module, keep=keep)

    def fill_own_tensors(self, module: nn.Module, *, keep: bool = True) -> None:
        """As `fill_module`, but only for the module's own tensors, not for the tensors of its submodules. A collective."""
        for name, tensor in _list_direct_tensors(module):
            if tensor.is_meta:
                self._fill_tensor(module, name, tensor, keep)

    def _fill_tensor(self, module: nn.Module, name: str, tensor: torch.Tensor, keep: bool) -> None:
        is_first = tensor not in self._sent_tensors
        if not is_first and tensor not in self._tied_tensors:
            return  # the tensor was sent earlier; this rank did not keep it, because another pipeline stage has it
        if is_first:
            self._sent_tensors.add(tensor)
            filled_tensor = torch.empty_like(tensor, device=self._device, requires_grad=False)
            if tensor in self._initial_values:
                filled_tensor.copy_(self._initial_values.pop(tensor))
            dist.broadcast(filled_tensor, src=0)
            if isinstance(tensor, nn.Parameter):
                filled_tensor = nn.Parameter(filled_tensor, requires_grad=tensor.requires_grad)
            if tensor in self._tied_tensors:
                self._tied_tensors[tensor] = filled_tensor
        else:
            filled_tensor = self._tied_tensors[tensor]
        if keep:
            setattr(module, name, filled_tensor)


def _list_direct_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and buffers, without the parameters and buffers of its submodules."""
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
