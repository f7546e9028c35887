"""The names of the values of a resolved cell. Expressions (--where, claims) and filters use these names to select cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shardlab.matrix import faults
from shardlab.matrix.cell import Cell, Optimizer, Schedule

# Keys of a cell whose value is a mapping with known members. Each member has a dotted name, such as optimizer.lr.
_REFINED: dict[str, type[msgspec.Struct]] = {"optimizer": Optimizer, "schedule": Schedule}
_WITHOUT = ("instruments", "options", "rehearses", *_REFINED)
ARGUMENTS = frozenset({"accuracy_pct", "of"})  # arguments of a metric in a claim that do not select a cell
# All names without a dot. `fault` says which faults the cell asks for (`faults.kinds`).
PLAIN = (*(field.name for field in msgspec.structs.fields(Cell) if field.name not in _WITHOUT), "gpu_batch_size", "fault")


def names(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a resolved cell, by name. Members of mappings have dotted names, such as optimizer.lr.

    cell: the cell as dicts, lists, text and numbers, as in run.json.
    """
    flat = {name: cell[name] for name in PLAIN if name in cell}
    for key in (*_REFINED, "options"):
        flat |= {f"{key}.{inner}": value for inner, value in cell[key].items()}
    size = cell["micro_batch_size"] * cell["gradient_accumulation_steps"]
    return flat | {"gpu_batch_size": size, "fault": faults.kinds(cell.get("instruments", {}))}


def is_name(name: str) -> bool:
    """Whether a resolved cell can have a value of this name. Every name options.NAME is accepted, because only strategies and
    workloads know their options."""
    head, _, tail = name.partition(".")
    if not tail:
        return name in PLAIN
    members = [field.name for field in msgspec.structs.fields(_REFINED[head])] if head in _REFINED else []
    return head == "options" or tail in members


def matches(cell: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a cell has all values in `wanted`, which are given by name. For a tiny twin, the original cell is compared."""
    return has(names(cell.get("rehearses") or cell), wanted)


def has(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether the values `known` of a cell, which `names` returned, contain all values in `wanted`."""
    return all(name in known and known[name] == value for name, value in wanted.items())
