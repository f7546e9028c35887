"""Caches the figures (numbers) of a trace in a file beside the trace: reading a trace takes seconds, and figures do not
change."""

from __future__ import annotations

import contextlib
import hashlib
from functools import cache
from pathlib import Path

import msgspec

from collect import sources
from collect import traces as traces_
from collect.traces import trace
from collect.traces.breakdown import Breakdown, compute_breakdown
from collect.traces.rank_analysis import RankAnalysis, analyse_rank
from shardlab.errors import WorkspaceError
from shardlab.files import files, json_file


class TraceFigures(msgspec.Struct, frozen=True):
    """The figures (numbers) of one undamaged trace."""

    breakdown: Breakdown
    """How the rank spent its time."""
    analysis: RankAnalysis
    """Further results of the rank (`RankAnalysis`)."""


class CachedFigures(msgspec.Struct):
    """The content of a cache file."""

    bytes: int
    """The size of the trace."""
    mtime_ns: int
    """The modification time of the trace."""
    code: str
    """The digest of the code that computed the figures."""
    figures: TraceFigures | None
    """None if the trace has no figures, or if it is damaged or cut short."""


def load_figures(path: Path) -> TraceFigures | None:
    """The figures of a trace. None if the trace is damaged or has no figures. Raises OSError if the trace cannot be opened.

    The figures are read from the cache file. They are computed again if the trace or the code changed since the cache file was
    written, or if the cache file is damaged.
    """
    file_status = path.stat()
    cache_entry = CachedFigures(file_status.st_size, file_status.st_mtime_ns, _compute_code_digest(), None)
    cache_path = path.with_name(f".{path.name}.figures.json")  # a hidden file, because the cache is not a record of the run
    cached_figures = json_file.read_json_if_valid(cache_path, CachedFigures)
    if cached_figures is not None and msgspec.structs.replace(cached_figures, figures=None) == cache_entry:
        return cached_figures.figures
    loaded_trace = trace.read_trace(path)
    cache_entry.figures = None if loaded_trace.lost or loaded_trace.cut else _compute_figures(loaded_trace)
    with contextlib.suppress(WorkspaceError):  # if the folder is read-only, there is no cache, and the trace is read each time
        files.write_atomic(cache_path, msgspec.json.encode(cache_entry), sync=False)
    return cache_entry.figures


def _compute_figures(loaded_trace: trace.Trace) -> TraceFigures | None:
    rank_breakdown, analysis = compute_breakdown(loaded_trace), analyse_rank(loaded_trace)
    return None if rank_breakdown is None or analysis is None else TraceFigures(rank_breakdown, analysis)


@cache
def _compute_code_digest() -> str:
    """The digest of the source code that reads traces and computes figures from them."""
    code_folders = (Path(package.__path__[0]) for package in (sources, traces_))
    code_texts = (path.read_bytes() for folder in code_folders for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(b"".join(code_texts)).hexdigest()
