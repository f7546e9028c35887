"""Finds the repeated blocks of a model that nobody wrote a list of blocks for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


class Blocks:
    """The blocks of one task's models, by the names that they have before anything is wrapped around them."""

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def of(self, model: nn.Module) -> list[nn.Module]:
        """The blocks, or what is wrapped around them. The first call must be with a model that is not wrapped."""
        if self._names is None:
            self._names = names(model)
        return [model.get_submodule(name) for name in self._names]


def names(model: nn.Module) -> list[str]:
    """The names of the blocks, in order: the layers that transformers itself checkpoints, if it marks any; else the members of
    lists (`nn.Sequential`, `nn.ModuleList`) that are of one class, that class which has the most parameters."""
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
    """The class of the blocks; several classes are joined by `and`."""
    return " and ".join(Counter(type(block).__name__ for block in blocks))


def _outermost(found: Sequence[str] | dict[str, nn.Module]) -> Iterator[str]:
    last = None
    for name in found:  # a module comes before those inside it
        if last is None or not name.startswith(f"{last}."):
            yield name
            last = name


def _parameters(modules: Sequence[nn.Module] | object) -> int:
    assert not isinstance(modules, nn.Module)
    return sum(p.numel() for module in modules for p in module.parameters())  # type: ignore[attr-defined]
