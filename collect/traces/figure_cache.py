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
from collect.traces.rank_analysis import RankAnalysis, analyse
from shardlab import files
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import WorkspaceError


class TraceFigures(msgspec.Struct, frozen=True):
    """What a whole trace came to: its breakdown, and what the answers about the run need of it."""

    breakdown: Breakdown
    analysis: RankAnalysis


class CachedFigures(msgspec.Struct):
    """What a trace of this size and time came to, by this code. figures: None where there are none, or half a trace."""

    bytes: int
    mtime_ns: int
    code: str
    figures: TraceFigures | None


def figures(path: Path) -> TraceFigures | None:
    """The figures of a trace that is whole, else None. OSError as open does.

    It is computed again where the trace or the code that reads it changed since, or what was kept is damaged.
    """
    status = path.stat()
    now = CachedFigures(status.st_size, status.st_mtime_ns, _code(), None)
    place = path.with_name(f".{path.name}.figures.json")  # hidden: no part of the run
    with contextlib.suppress(OSError, *DECODE_FAULTS):
        kept = decoder(CachedFigures).decode(files.read(place))
        if msgspec.structs.replace(kept, figures=None) == now:
            return kept.figures
    found = trace.read(path)
    now.figures = None if found.lost or found.cut else _figures(found)
    with contextlib.suppress(WorkspaceError):  # a run that may only be read is read again each time
        files.write_atomic(place, msgspec.json.encode(now), sync=False)
    return now.figures


def _figures(found: trace.Trace) -> TraceFigures | None:
    told, analysis = breakdown(found), analyse(found)
    return None if told is None or analysis is None else TraceFigures(told, analysis)


@cache
def _code() -> str:
    """The digest of all that reads traces."""
    folders = (Path(package.__path__[0]) for package in (sources, traces_))
    texts = (path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()
