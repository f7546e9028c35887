"""The order in which a pass needs the parameters. From this order, ZeRO-3 decides when it gathers and frees parameters."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper


def order_of_use(model: nn.Module) -> list[int]:
    """The ids of parameters in the order in which forward and backward need them. A tied parameter occurs once for each module
    that uses it.

    Forward uses modules in the order of `model.modules()`, backward in the reverse order. A checkpointed block is recomputed
    before its backward, except its last module, because backward needs only the inputs of the last module.
    """
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    wrapper_of = {id(module): wrapper for wrapper in wrappers for module in wrapper.modules()}

    def own(module: nn.Module) -> list[int]:
        return [id(p) for p in module.parameters(recurse=False) if p.requires_grad]

    users = [module for module in model.modules() if own(module)]
    order = list(users)
    again: nn.Module | None = None
    for module in reversed(users):
        wrapper = wrapper_of.get(id(module))
        if wrapper is not None and wrapper is not again:
            order += [inner for inner in wrapper.modules() if own(inner) and inner is not module]
        again = wrapper
        order.append(module)
    return [parameter for module in order for parameter in own(module)]
