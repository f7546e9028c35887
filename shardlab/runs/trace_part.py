"""A part of a folder with profiler traces: the files that one run of `jobs trace` analyses. `collect` reads it, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from shardlab.record_types import Count, Positive

# The name of the strategy and of the launcher in the cells of runs that analyse traces. No menu contains this name, so no
# matrix can contain such a cell.
TRACE_STRATEGY = "trace"
SET_NAME = re.compile(r"traces-[0-9a-f]{12}")  # the name of all runs that analyse one folder; the `matrix` of these runs
SUMMARIES_FOLDER = "trace-summaries"  # the folder in a run folder that contains one summary for each trace file


class TracePart(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of `jobs trace` analyses."""

    folder: str
    """The absolute path of the folder on the cluster."""
    files: Annotated[list[str], msgspec.Meta(min_length=1)]
    """The names of the trace files in it, with their subfolder."""
    place: Count
    """The number of this part, from 0."""
    parts: Positive
    """The number of all parts."""


def find_trace_paths(traces_folder: Path) -> list[Path]:
    """The files in a folder and its subfolders that may be traces, sorted: *.json and *.json.gz that are not hidden."""
    return sorted(path for path in traces_folder.rglob("*.json*") if _may_be_trace(path.relative_to(traces_folder)))


def _may_be_trace(path: Path) -> bool:
    is_hidden = any(name.startswith(".") for name in path.parts)
    return not is_hidden and not path.name.endswith((".jsonl", ".jsonl.gz"))  # lines of JSON are records, and no traces


def make_summary_name(trace_number: int) -> str:
    """The name of the file with the summary of a trace. trace_number: the place of the trace in the part, from 0."""
    return f"{trace_number:06d}.json"
