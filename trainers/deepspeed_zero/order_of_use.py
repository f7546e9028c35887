"""When a pass needs which parameter: what ZeRO-3 gathers, keeps and frees by."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def order_of_use(model: nn.Module) -> list[int]:
    """The parameters (by id) in the order in which forward and backward of a pass need them, tied ones once for each module.

    Modules are taken in the order in which the model names them, then backwards. A checkpointed block is computed again
    before its backward, up to its last module, whose inputs are all that backward lacks.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

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
