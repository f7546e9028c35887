"""The names by which expressions and filters know a resolved cell, for those who choose cells and those who judge them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shardlab.cell import Cell, Optimizer, Schedule

# Mappings whose members have names of their own.
_REFINED: dict[str, type[msgspec.Struct]] = {"optimizer": Optimizer, "schedule": Schedule}
_WITHOUT = ("instruments", "options", "rehearses", *_REFINED)
ARGUMENTS = frozenset({"accuracy_pct", "of"})  # that a claim gives to a metric, beside the names that choose a cell
PLAIN = (*(field.name for field in msgspec.structs.fields(Cell) if field.name not in _WITHOUT), "gpu_batch_size")


def names(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Name to value of a resolved cell in its plain form, as run.json holds it; members of a mapping have a dot."""
    flat = {name: cell[name] for name in PLAIN if name in cell}
    for key in (*_REFINED, "options"):
        flat |= {f"{key}.{inner}": value for inner, value in cell[key].items()}
    return flat | {"gpu_batch_size": cell["micro_batch_size"] * cell["gradient_accumulation_steps"]}


def is_name(name: str) -> bool:
    """Whether a resolved cell may have this name; which options there are only the plug-ins know."""
    head, _, tail = name.partition(".")
    if not tail:
        return name in PLAIN
    members = [field.name for field in msgspec.structs.fields(_REFINED[head])] if head in _REFINED else []
    return head == "options" or tail in members


def matches(cell: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a cell has all these values; for the tiny twin of a cell it is that cell which has to have them."""
    known = names(cell.get("rehearses") or cell)
    return all(name in known and known[name] == value for name, value in wanted.items())
