"""Reads the file in which a rank recorded its memory over one step or several, by category (parameters, gradients ...).

A rank writes this file if the cell has `instruments: {memory: categories}`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardlab.files import json_file
from shardlab.record_types import Count, Milliseconds


class MemoryCurves(msgspec.Struct):
    """The memory of one rank over consecutive steps, as in the file `memory/rank-RRRRR.json` of a run. Other fields of the file
    are ignored.

    step, steps: the first step, and the number of steps. t_ms: the moments, in milliseconds since the start of the first step.
    points: for each category, the bytes at these moments.
    """

    rank: Count
    step: Count
    t_ms: list[Milliseconds]
    points: dict[str, list[Count]]
    steps: Count = 1


def read_memory_curves(path: Path) -> MemoryCurves | None:
    """The memory curves in a file; None if there is no such file, if it cannot be read, or if its folder is a symbolic link."""
    if path.parent.is_symlink():
        return None
    curves = json_file.read_json_if_valid(path, MemoryCurves)
    if curves is None or any(len(curve) != len(curves.t_ms) for curve in curves.points.values()):
        return None
    return curves
