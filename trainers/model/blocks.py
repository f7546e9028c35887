"""Finds the repeated blocks of a model whose author did not list them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


class BlockFinder:
    """Finds the blocks of one task's models. It remembers the names that blocks have before a wrapper (FSDP, checkpointing)
    replaces them."""

    def __init__(self) -> None:
        self._block_names: list[str] | None = None

    def find_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a model, or their wrappers if the model is wrapped. The first call needs a model without wrappers."""
        if self._block_names is None:
            self._block_names = find_block_names(model)
        return [model.get_submodule(name) for name in self._block_names]


def find_block_names(model: nn.Module) -> list[str]:
    """The names of the blocks of a model, in order.

    If transformers marks layers for checkpointing, they are the blocks. Else the blocks are members of lists (`nn.Sequential`,
    `nn.ModuleList`) that all have the same class; of several such classes, the class with the most parameters is chosen.
    """
    marked_names = [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    if marked_names:
        return list(_list_outermost_paths(marked_names))
    blocks_by_class: dict[type, dict[str, nn.Module]] = defaultdict(dict)
    for outer_name, module in model.named_modules():
        for inner_name, member in module.named_children() if isinstance(module, (nn.Sequential, nn.ModuleList)) else ():
            is_list = isinstance(member, (nn.Sequential, nn.ModuleList))
            if not is_list and any(True for _ in member.children()) and any(True for _ in member.parameters()):
                blocks_by_class[type(member)][f"{outer_name}.{inner_name}" if outer_name else inner_name] = member
    repeated_groups = [group for group in blocks_by_class.values() if len(group) > 1]
    if not repeated_groups:
        return []
    return list(_list_outermost_paths(max(repeated_groups, key=lambda group: (_count_parameters(group.values()), len(group)))))


def join_block_class_names(blocks: Sequence[nn.Module]) -> str:
    """The name of the blocks' class; the names of several classes are joined by `and`."""
    return " and ".join(Counter(type(block).__name__ for block in blocks))


def _list_outermost_paths(paths: Sequence[str] | dict[str, nn.Module]) -> Iterator[str]:
    last_path = None
    for path in paths:  # a module comes directly before all modules inside it, so `last` is the only name to compare with
        if last_path is None or not path.startswith(f"{last_path}."):
            yield path
            last_path = path


def _count_parameters(modules: Sequence[nn.Module] | object) -> int:
    assert not isinstance(modules, nn.Module)
    return sum(p.numel() for module in modules for p in module.parameters())  # type: ignore[attr-defined]
