"""The names of a resolved cell's values in expressions and filters, which select cells and judge claims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shardlab.cell import Cell, Optimizer, Schedule

# Mappings whose members have names of their own.
_REFINED: dict[str, type[msgspec.Struct]] = {"optimizer": Optimizer, "schedule": Schedule}
_WITHOUT = ("instruments", "options", "rehearses", *_REFINED)
ARGUMENTS = frozenset({"accuracy_pct", "of"})  # of a metric in a claim, besides the names that select a cell
PLAIN = (*(field.name for field in msgspec.structs.fields(Cell) if field.name not in _WITHOUT), "gpu_batch_size")


def names(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a resolved cell by name. cell: in its plain form, as in run.json. Members of mappings have dotted names."""
    flat = {name: cell[name] for name in PLAIN if name in cell}
    for key in (*_REFINED, "options"):
        flat |= {f"{key}.{inner}": value for inner, value in cell[key].items()}
    return flat | {"gpu_batch_size": cell["micro_batch_size"] * cell["gradient_accumulation_steps"]}


def is_name(name: str) -> bool:
    """Whether a resolved cell may have this name. All names of options are accepted, as only the plug-ins know them."""
    head, _, tail = name.partition(".")
    if not tail:
        return name in PLAIN
    members = [field.name for field in msgspec.structs.fields(_REFINED[head])] if head in _REFINED else []
    return head == "options" or tail in members


def matches(cell: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a cell has all these values; for the tiny twin of a cell, whether the original cell has them."""
    known = names(cell.get("rehearses") or cell)
    return all(name in known and known[name] == value for name, value in wanted.items())
