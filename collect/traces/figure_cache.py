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
from collect.traces.file_figures import FileFigures, compute_file_figures
from shardlab.errors import WorkspaceError
from shardlab.files import files, json_file


class CachedFigures(msgspec.Struct):
    """The content of a cache file."""

    bytes: int
    """The size of the trace."""
    mtime_ns: int
    """The modification time of the trace."""
    code: str
    """The digest of the code that computed the figures."""
    figures: FileFigures | None
    """The figures of the trace, and what it lacks; None only while it is not read yet."""


def load_figures(path: Path) -> FileFigures:
    """The figures of a trace, and what is damaged or missing. Raises OSError if the trace cannot be opened.

    The figures are read from the cache file. They are computed again if the trace or the code changed since the cache file was
    written, or if the cache file is damaged.
    """
    file_status = path.stat()
    cache_entry = CachedFigures(file_status.st_size, file_status.st_mtime_ns, _compute_code_digest(), None)
    cache_path = path.with_name(f".{path.name}.figures.json")  # a hidden file, because the cache is not a record of the run
    cached_figures = json_file.read_json_if_valid(cache_path, CachedFigures)
    if cached_figures and cached_figures.figures and msgspec.structs.replace(cached_figures, figures=None) == cache_entry:
        return cached_figures.figures
    figures = msgspec.structs.replace(compute_file_figures(trace.read_trace(path)), path=path.name)
    cache_entry.figures = figures
    with contextlib.suppress(WorkspaceError):  # if the folder is read-only, there is no cache, and the trace is read each time
        files.write_atomic(cache_path, msgspec.json.encode(cache_entry), sync=False)
    return figures


@cache
def _compute_code_digest() -> str:
    """The digest of the source code that reads traces and computes figures from them."""
    code_folders = (Path(package.__path__[0]) for package in (sources, traces_))
    code_texts = (path.read_bytes() for folder in code_folders for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(b"".join(code_texts)).hexdigest()
