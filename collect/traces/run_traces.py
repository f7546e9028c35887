"""Reads the figures (numbers) of a run's traces: exact, and as HolisticTraceAnalysis computes them if the matrix asks for
it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import msgspec

from collect.traces import figure_cache, hta, trace
from collect.traces.breakdown import Breakdown
from collect.traces.file_figures import FileFigures, expect_gpu
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.run_answers import RunAnswers
from shardlab.errors import InputError
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


def read_run_traces(run_path: Path, mode: Traces, on_gpu: bool = False) -> RunTraces:
    """Read the figures of the traces in a run folder.

    mode: `like-hta` to get the figures of HolisticTraceAnalysis, too. on_gpu: whether the result says that the run
    used GPUs. A trace that is damaged, cut short, or lacks work of the GPU is left out, because incomplete figures must not
    rank cells.
    """
    trace_paths = select_regular_files((run_path / "trace").glob("rank-*.json.gz"))
    files = [expect_gpu(figure_cache.load_figures(path), on_gpu) for path in trace_paths]
    usable = [(path, entry) for path, entry in zip(trace_paths, files, strict=True) if entry.is_usable]
    exact = [entry.breakdown for _, entry in usable if entry.breakdown]
    return RunTraces(
        exact,
        [entry.analysis for _, entry in usable if entry.analysis],
        _read_like_hta([path for path, _ in usable])
        if mode == "like-hta" and any(breakdown.source == "gpu" for breakdown in exact)
        else [],
        files,
    )


def ran_on_gpu(result: Result | None) -> bool:
    """Whether the result of a run says that its ranks trained on GPUs."""
    return result is not None and bool(result.gpus)


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
