"""Finds the trace files of a run or of a folder, and names them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from collect.traces import run_traces
from shardlab.errors import InputError
from shardlab.runs import trace_part
from shardlab.workspace.workspace import Workspace


def find_trace_files(workspace: Workspace, run: str) -> list[Path]:
    """Find the trace files of a run. Raises InputError if there are no traces.

    run: the id of a run; or, if it contains a slash, the path of a trace file or of a folder with traces, also in its
    subfolders.
    """
    is_path = "/" in run
    folder = Path(run) if is_path else workspace.find_run(run).path / "trace"
    if is_path and folder.is_file():
        return [folder]
    trace_paths = trace_part.find_trace_paths(folder)
    paths = trace_paths if is_path else run_traces.select_regular_files(trace_paths)
    if not paths:
        raise InputError(
            f"{folder}: no traces. Allowed: a run whose cell has instruments: {{profile: ...}}, or a folder or file (with a "
            "slash in its name) of Chrome traces, *.json or *.json.gz; subfolders are searched too."
        )
    return paths


def name_files(paths: Sequence[str]) -> list[str]:
    """The name of each file in their common folder, such as iteration_10/rank0_trace.json."""
    folder = os.path.commonpath([Path(path).parent for path in paths]) if paths else ""
    return [os.path.relpath(path, folder or ".") for path in paths]
