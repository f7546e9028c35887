"""The switches that any strategy over a plain model can take: activation checkpointing, torch.compile, gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardlab.cell import Cell

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.workload import Task

ALL = ("activation_checkpointing", "compile", "max_grad_norm")
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def checkpoint_and_compile(cell: Cell, task: Task, model: nn.Module) -> nn.Module:
    """Turn on what the cell asks of a whole model, block by block; the same model. Before any sharding or replication."""
    if cell.activation_checkpointing != "none":
        _checkpoint(cell.activation_checkpointing, task, model)
    if cell.compile:
        for block in task.blocks(model):
            block.compile()
    return model


def _checkpoint(which: str, task: Task, model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    every = 1 if which == "full" else int(which.removeprefix("every-"))
    chosen = {id(block) for index, block in enumerate(task.blocks(model)) if index % every == 0}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)


def effective(model: nn.Module) -> dict[str, Any]:
    """What of it stands in the model: how many blocks are recomputed in backward, how many are compiled."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    modules = list(model.modules())
    return {
        "checkpointed_blocks": sum(isinstance(module, CheckpointWrapper) for module in modules),
        "compiled_blocks": sum(module._compiled_call_impl is not None for module in modules),
    }


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The L2 norm over all gradients (0-dim); of sharded ones (DTensor) over all shards."""
    import torch
    from torch.distributed.tensor import DTensor

    gradients = [p.grad for p in parameters if p.grad is not None]
    # As torch.nn.utils.get_total_norm, which would round each norm and their sum to the gradients' dtype.
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale all gradients by max_norm / norm where that is below 1."""
    from torch.nn.utils import clip_grads_with_norm_

    clip_grads_with_norm_(list(parameters), max_norm, norm)


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters by their own names, wrappers' prefixes taken off, in fp32 on the CPU; shards (DTensor) gathered."""
    from torch.distributed.tensor import DTensor

    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[plain_name(name)] = whole.detach().float().cpu().clone()
    return found


def plain_name(name: str) -> str:
    """A parameter's name as the bare model has it."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper) if wrapper == "module." else name.replace(wrapper, "")
    return name
