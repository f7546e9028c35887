"""The names of the values of a resolved cell. Expressions (--where, claims) and filters use these names to select cells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from shardlab.matrix import faults
from shardlab.matrix.cell import AnyCell, Optimizer, Schedule

# Keys of a cell whose value is a mapping with known members. Each member has a dotted name, such as optimizer.lr.
_KEYS_WITH_MEMBERS: dict[str, type[msgspec.Struct]] = {"optimizer": Optimizer, "schedule": Schedule}
# Keys whose value is a mapping with any members.
_FREE_MAPPINGS = ("options", "set", "env")
_UNNAMED_KEYS = ("instruments", "rehearses", "command", *_FREE_MAPPINGS, *_KEYS_WITH_MEMBERS)
METRIC_ARGUMENTS = frozenset({"accuracy_pct", "of"})  # arguments of a metric in a claim that do not select a cell
# All names without a dot. `fault` says which faults the cell asks for (`faults.list_fault_names`).
PLAIN_NAMES = (
    *(field.name for field in msgspec.structs.fields(AnyCell) if field.name not in _UNNAMED_KEYS),
    "gpu_batch_size",
    "fault",
)


def map_cell_values(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a resolved cell, by name. Members of mappings have dotted names, such as optimizer.lr.

    cell: the cell as dicts, lists, text and numbers, as in run.json.
    """
    value_by_name = {name: cell[name] for name in PLAIN_NAMES if name in cell}
    for key in (*_KEYS_WITH_MEMBERS, *_FREE_MAPPINGS):
        value_by_name |= {f"{key}.{member_name}": value for member_name, value in (cell.get(key) or {}).items()}
    batch_sizes = cell["micro_batch_size"], cell["gradient_accumulation_steps"]
    gpu_batch_size = None if None in batch_sizes else math.prod(batch_sizes)
    return value_by_name | {"gpu_batch_size": gpu_batch_size, "fault": faults.list_fault_names(cell.get("instruments", {}))}


def is_cell_name(name: str) -> bool:
    """Whether a resolved cell can have a value of this name. Every name options.NAME is accepted, because only strategies and
    workloads know their options, and every name set.NAME and env.NAME."""
    head, _, name_tail = name.partition(".")
    if not name_tail:
        return name in PLAIN_NAMES
    member_names = (
        [field.name for field in msgspec.structs.fields(_KEYS_WITH_MEMBERS[head])] if head in _KEYS_WITH_MEMBERS else []
    )
    return head in _FREE_MAPPINGS or name_tail in member_names


def matches_cell(cell: Mapping[str, Any], required_values: Mapping[str, Any]) -> bool:
    """Whether a cell has all values in `required_values`, which are given by name. For a tiny twin, the original cell is
    compared."""
    return has_values(map_cell_values(cell.get("rehearses") or cell), required_values)


def has_values(cell_values: Mapping[str, Any], required_values: Mapping[str, Any]) -> bool:
    """Whether the values `cell_values` of a cell, which `map_cell_values` returned, contain all values in `required_values`."""
    return all(name in cell_values and cell_values[name] == value for name, value in required_values.items())
