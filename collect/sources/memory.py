"""What memory held over one step, by category, as a rank wrote it (`instruments: {memory: categories}`)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardlab import files
from shardlab.decoders import DECODE_FAULTS, decoder


class MemoryCurves(msgspec.Struct):
    """Bytes by category at the moments t_ms, milliseconds since the step began. Other fields of the file are read over."""

    rank: int
    step: int
    t_ms: list[float]
    points: dict[str, list[int]]


def read(path: Path) -> MemoryCurves | None:
    """The curves of a file, or None if there is none or it cannot be read, as when its folder is a symlink."""
    if path.parent.is_symlink():
        return None
    try:
        curves = decoder(MemoryCurves).decode(files.read(path))
    except (OSError, *DECODE_FAULTS):
        return None
    return curves if all(len(curve) == len(curves.t_ms) for curve in curves.points.values()) else None
