"""Reads the figures (numbers) of a run's traces: exact, and as HolisticTraceAnalysis computes them if the matrix asks for it.

The figures of a trace are cached in a file beside the trace: reading a trace takes seconds, and figures do not change.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path

import msgspec

from collect import sources
from collect import traces as traces_
from collect.traces import hta, trace
from collect.traces.breakdown import Breakdown
from collect.traces.file_figures import FileFigures, compute_file_figures, expect_gpu
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.run_answers import RunAnswers
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files, json_file
from shardlab.matrix.study import Traces
from shardlab.runs.record import Result


class RunTraces(msgspec.Struct, frozen=True, dict=True):
    """The figures (numbers) of the profiled ranks of a run. Traces that are damaged or lack work of the GPU are left out."""

    exact: list[Breakdown] = []
    """The exact breakdown of each rank."""
    analyses: list[RankAnalysis] = []
    """For the same ranks, the data from which `answers` is computed; always exact."""
    like_hta: list[Breakdown] = []
    """The breakdown of each rank as HolisticTraceAnalysis computes it; empty if the matrix does not ask for it, or if
    HolisticTraceAnalysis has no result."""
    files: list[FileFigures] = []
    """The figures of all trace files of the run, also of those that are left out."""

    @cached_property
    def answers(self) -> RunAnswers:
        """Results about the run as a whole, computed from `analyses`."""
        return RunAnswers(self.analyses)

    @property
    def judged_breakdowns(self) -> list[Breakdown]:
        """The breakdowns from which metrics are computed: `like_hta` if it is not empty, else `exact`."""
        return self.like_hta or self.exact


def read_run_traces(run_path: Path, trace_method: Traces, used_gpus: bool = False) -> RunTraces:
    """Read the figures of the traces in a run folder.

    trace_method: `like-hta` to get the figures of HolisticTraceAnalysis, too. used_gpus: whether the result says that the run
    used GPUs. A trace that is damaged, cut short, or lacks work of the GPU is left out, because incomplete figures must not
    rank cells.
    """
    trace_paths = select_regular_files((run_path / "trace").glob("rank-*.json.gz"))
    file_figures = [expect_gpu(load_figures(path), used_gpus) for path in trace_paths]
    usable_figures = [(path, figures) for path, figures in zip(trace_paths, file_figures, strict=True) if figures.is_usable]
    exact_breakdowns = [figures.breakdown for _, figures in usable_figures if figures.breakdown]
    return RunTraces(
        exact_breakdowns,
        [figures.analysis for _, figures in usable_figures if figures.analysis],
        _read_like_hta([path for path, _ in usable_figures])
        if trace_method == "like-hta" and any(breakdown.source == "gpu" for breakdown in exact_breakdowns)
        else [],
        file_figures,
    )


def trained_on_gpus(run_result: Result | None) -> bool:
    """Whether the result of a run says that its ranks trained on GPUs."""
    return run_result is not None and bool(run_result.gpus)


def select_regular_files(paths: Iterable[Path]) -> list[Path]:
    """The paths that are regular files, sorted. Symlinks are left out because they could lead out of the run folder, and
    FIFOs because reading them would block."""
    return sorted(path for path in paths if path.is_file() and not path.is_symlink() and not path.parent.is_symlink())


def _read_like_hta(trace_paths: list[Path]) -> list[Breakdown]:
    """The breakdowns as HolisticTraceAnalysis computes them. Empty if it has no result for any one trace.

    HolisticTraceAnalysis itself would then fail for all traces.
    """
    try:
        return hta.compute_hta_breakdowns([trace.read_trace(path) for path in trace_paths])
    except InputError:
        return []


class FiguresCacheEntry(msgspec.Struct):
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
    cache_entry = FiguresCacheEntry(file_status.st_size, file_status.st_mtime_ns, _compute_code_digest(), None)
    cache_path = path.with_name(f".{path.name}.figures.json")  # a hidden file, because the cache is not a record of the run
    cached_figures = json_file.read_json_if_valid(cache_path, FiguresCacheEntry)
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
