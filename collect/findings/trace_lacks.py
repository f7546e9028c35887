"""Remarks on the traces of a matrix: recordings that lack something, damaged traces, and ranks that were not profiled."""

from __future__ import annotations

from collections.abc import Iterator

from collect.loading.loaded_run import LoadedRun
from collect.reading.load import LoadedMatrix
from collect.traces.file_figures import FileFigures
from collect.traces.lacks import LackKind

_REMARK_BY_LACK: dict[LackKind, str] = {
    "launches": "traces are not used, because launches have no event of the GPU",
    "copies": "copies or sets of memory have no event of the GPU, so idle time and memory operations are blank in",
    "overlaps": "traces are not used, because kernels or copies overlap the next one of their stream",
    "devices": "several devices in one row, so idle time is blank in",
    "no gpu events": "traces are not used, because they have no event of a GPU although the run used one",
}
_DAMAGED_REMARK = "traces are not used, because they are damaged"
_WITHOUT_FIGURES_REMARK = "traces without figures"
_MISSING_RANKS_REMARK = (
    "not all ranks were profiled, so bandwidths of collectives and waiting for slow ranks are bounds, and no metrics, in"
)


def list_trace_lacks(loaded: LoadedMatrix) -> dict[str, list[str]]:
    """{remark: the trace files or runs that it is about, each with a count} for all completed runs of a matrix."""
    places_by_remark: dict[str, list[str]] = {}
    for run in (run for cell in loaded.cells for run in cell.completed_runs):
        for remark, place in _list_run_remarks(run):
            places_by_remark.setdefault(remark, []).append(place)
    return places_by_remark


def _list_run_remarks(run: LoadedRun) -> Iterator[tuple[str, str]]:
    for file_figures in run.traces.files:
        trace_path = f"{run.run_id}/trace/{file_figures.path}"
        if file_figures.damage:
            yield _DAMAGED_REMARK, f"{trace_path} ({'; '.join(file_figures.damage)})"
        elif file_figures.why and not file_figures.lacks:
            yield _WITHOUT_FIGURES_REMARK, f"{trace_path} ({file_figures.why})"
        yield from _list_file_remarks(trace_path, file_figures)
    if run.traces.answers.missing_ranks:
        profiled_count, rank_count = len(run.traces.analyses), run.traces.answers.rank_count
        yield _MISSING_RANKS_REMARK, f"{run.run_id} ({profiled_count:,} of {rank_count:,} ranks)"


def _list_file_remarks(trace_path: str, file_figures: FileFigures) -> Iterator[tuple[str, str]]:
    for lack in file_figures.lacks:
        yield _REMARK_BY_LACK[lack.kind], f"{trace_path} ({lack.count:,} of {lack.total:,})" if lack.total else trace_path
