"""Finds the repeated blocks of a model whose author did not list them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


class Blocks:
    """Finds the blocks of one task's models. It remembers the names that blocks have before a wrapper (FSDP, checkpointing)
    replaces them."""

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def of(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a model, or their wrappers if the model is wrapped. The first call needs a model without wrappers."""
        if self._names is None:
            self._names = names(model)
        return [model.get_submodule(name) for name in self._names]


def names(model: nn.Module) -> list[str]:
    """The names of the blocks of a model, in order.

    If transformers marks layers for checkpointing, they are the blocks. Else the blocks are members of lists (`nn.Sequential`,
    `nn.ModuleList`) that all have the same class; of several such classes, the class with the most parameters is chosen.
    """
    marked = [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    if marked:
        return list(_outermost(marked))
    members: dict[type, dict[str, nn.Module]] = defaultdict(dict)
    for outer, module in model.named_modules():
        for inner, member in module.named_children() if isinstance(module, (nn.Sequential, nn.ModuleList)) else ():
            is_list = isinstance(member, (nn.Sequential, nn.ModuleList))
            if not is_list and any(True for _ in member.children()) and any(True for _ in member.parameters()):
                members[type(member)][f"{outer}.{inner}" if outer else inner] = member
    several = [found for found in members.values() if len(found) > 1]
    if not several:
        return []
    return list(_outermost(max(several, key=lambda found: (_parameters(found.values()), len(found)))))


def classes(blocks: Sequence[nn.Module]) -> str:
    """The name of the blocks' class; the names of several classes are joined by `and`."""
    return " and ".join(Counter(type(block).__name__ for block in blocks))


def _outermost(found: Sequence[str] | dict[str, nn.Module]) -> Iterator[str]:
    last = None
    for name in found:  # a module comes directly before all modules inside it, so `last` is the only name to compare with
        if last is None or not name.startswith(f"{last}."):
            yield name
            last = name


def _parameters(modules: Sequence[nn.Module] | object) -> int:
    assert not isinstance(modules, nn.Module)
    return sum(p.numel() for module in modules for p in module.parameters())  # type: ignore[attr-defined]
