"""Caches the figures of a trace in a file beside it: reading a trace takes seconds, and its figures do not change."""

from __future__ import annotations

import contextlib
import hashlib
from functools import cache
from pathlib import Path

import msgspec

from collect import sources
from collect import traces as traces_
from collect.traces import trace
from collect.traces.breakdown import Breakdown, breakdown
from shardlab import files
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import WorkspaceError


class CachedFigures(msgspec.Struct):
    """What a trace of this size and time came to, by this code. breakdown: None where there is none, or half a trace."""

    bytes: int
    mtime_ns: int
    code: str
    breakdown: Breakdown | None


def figures(path: Path) -> Breakdown | None:
    """The breakdown of a trace that is whole, else None. OSError as open does.

    It is computed again where the trace or the code that reads it changed since, or what was kept is damaged.
    """
    status = path.stat()
    now = CachedFigures(status.st_size, status.st_mtime_ns, _code(), None)
    place = path.with_name(f".{path.name}.figures.json")  # hidden: no part of the run
    with contextlib.suppress(OSError, *DECODE_FAULTS):
        kept = decoder(CachedFigures).decode(files.read(place))
        if msgspec.structs.replace(kept, breakdown=None) == now:
            return kept.breakdown
    found = trace.read(path)
    now.breakdown = None if found.lost or found.cut else breakdown(found)
    with contextlib.suppress(WorkspaceError):  # a run that may only be read is read again each time
        files.write_atomic(place, msgspec.json.encode(now), sync=False)
    return now.breakdown


@cache
def _code() -> str:
    """The digest of all that reads traces."""
    folders = (Path(package.__path__[0]) for package in (sources, traces_))
    texts = (path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()
