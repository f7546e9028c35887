"""Reads the file in which a rank recorded its memory over one step or several, by category (parameters, gradients ...).

A rank writes this file if the cell has `instruments: {memory: categories}`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardlab.files import json_file
from shardlab.record_types import Count, Milliseconds


class MemoryCurves(msgspec.Struct):
    """The memory of one rank over consecutive steps. Other fields of the file `memory/rank-RRRRR.json` are ignored."""

    rank: Count
    step: Count
    """The first step."""
    t_ms: list[Milliseconds]
    """The moments, in milliseconds since the start of the first step."""
    points: dict[str, list[Count]]
    """For each category, the bytes at these moments."""
    steps: Count = 1
    """The number of steps."""


def read_memory_curves(path: Path) -> MemoryCurves | None:
    """The memory curves in a file; None if there is no such file, if it cannot be read, or if its folder is a symbolic link."""
    if path.parent.is_symlink():
        return None
    memory_curves = json_file.read_json_if_valid(path, MemoryCurves)
    if memory_curves is None or any(len(curve) != len(memory_curves.t_ms) for curve in memory_curves.points.values()):
        return None
    return memory_curves
