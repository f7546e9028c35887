"""The options that work with any strategy over a plain torch model: activation checkpointing, torch.compile and gradient
clipping; and functions on the gradients and parameters of such a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from shardlab.matrix.cell import Cell
from trainers.model import activation_checkpointing

if TYPE_CHECKING:
    from trainers.task import Task

ALL_OPTIONS = ("activation_checkpointing", "compile", "max_grad_norm")
_IN_CHAIN = re.compile(r"_at:([^.]+)")  # the names of blocks in trainers.model.activation_checkpointing.Chain
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def checkpoint_and_compile(cell: Cell, task: Task, model: nn.Module) -> nn.Module:
    """Apply the cell's activation checkpointing and compilation, block by block, in place. Call it before sharding or DDP."""
    if cell.activation_checkpointing != "none":
        activation_checkpointing.checkpoint_blocks(cell.activation_checkpointing, task, model)
    if cell.compile:
        for block in activation_checkpointing.list_block_units(task, model):
            block.compile()
    return model


def count_changed_blocks(model: nn.Module) -> dict[str, Any]:
    """How many blocks of the model are recomputed in backward, and how many are compiled."""
    return {
        "checkpointed_blocks": activation_checkpointing.count_checkpointed_blocks(model),
        "compiled_blocks": sum(module._compiled_call_impl is not None for module in model.modules()),
    }


def compute_gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The L2 norm of all gradients (0-dim), over all shards if they are sharded (DTensor)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    # torch.nn.utils.get_total_norm is not used, because it rounds each norm and their sum to the gradients' dtype.
    norm = torch.linalg.vector_norm(torch.stack(_compute_gradient_norms(gradients)))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _compute_gradient_norms(gradients: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The L2 norm of each gradient (0-dim), in fp32."""
    if Version(torch.__version__).release >= (2, 14) and isinstance(gradients[0], DTensor):
        # With DTensors, `_foreach_norm` of torch 2.14 takes its dtype for a dimension (pull request 194033 of PyTorch).
        return tuple(torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients)
    return torch._foreach_norm(gradients, 2, dtype=torch.float32)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale all gradients by the ratio max_norm / norm if this ratio is below 1."""
    clip_grads_with_norm_(list(parameters), max_norm, norm)


def free_gathered_parameters(model: nn.Module) -> None:
    """Free the whole parameters that fully_shard (FSDP2) keeps after forward for a backward pass. Called after a forward pass
    that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters in fp32 on the CPU, by names without the prefixes of wrappers. Sharded parameters (DTensor) are
    gathered, so with them this is a collective."""
    weight_by_name = {}
    for name, parameter in model.named_parameters():
        weight = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weight_by_name[plain_name(name)] = weight.detach().float().cpu().clone()
    return weight_by_name


def plain_name(name: str) -> str:
    """The name that a parameter has in the model without wrappers. name: its name in the wrapped model."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper) if wrapper == "module." else name.replace(wrapper, "")
    if (chained_match := _IN_CHAIN.search(name)) is not None:
        name = chained_match[1].replace(":", ".") + name[chained_match.end() :]
    return name
