"""Weights that one rank draws for all: the model begins without memory, and each unit gets what is sent to it when it is cut.

FSDP1 has this as `sync_module_states`, which torch 2.13 refuses on a CPU; so the sending is done here, alike on all devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.ranks import Ranks
    from trainers.workload import Task


def model(task: Task, ranks: Ranks) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """(the task's model on torch's meta device; what gives one of its modules memory and content, for `param_init_fn`).

    Rank 0 draws the weights into host memory, and keeps them as long as the second is there. That is a collective: all ranks
    call it for the same modules in the same order.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    with torch.device("meta"):
        shapes = task.model()
    drawn = dict(zip(shapes.modules(), task.model().modules(), strict=True)) if ranks.rank == 0 else {}
    made: dict[torch.Tensor, torch.Tensor] = {}  # tied weights stay one: `Module.to_empty` would part them

    def content(tensor: torch.Tensor, module: nn.Module, name: str) -> torch.Tensor:
        here = torch.empty_like(tensor, device=ranks.device, requires_grad=False)
        if drawn:
            here.copy_(getattr(drawn[module], name).detach())
        dist.broadcast(here, src=0)
        return here

    def fill(module: nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer not in made:
                made[buffer] = content(buffer, module, name)
            setattr(module, name, made[buffer])
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if weight not in made:
                made[weight] = nn.Parameter(content(weight, module, name), requires_grad=weight.requires_grad)
            setattr(module, name, made[weight])

    return shapes, fill
