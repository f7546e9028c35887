"""The number of runs (repeats) of each cell of a matrix, and the estimated time of all runs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from shardlab.errors import ShardlabError
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.cell_names import METRIC_ARGUMENTS, matches_cell
from shardlab.matrix.expression import Expression
from shardlab.matrix.matrix import MatrixFile, Repeats
from shardlab.runs.run import make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace


class EstimatedCost(msgspec.Struct, frozen=True):
    """The estimated time of the runs of a plan, from earlier runs of the same cells in this workspace."""

    cells: int
    """The number of planned cells that have completed in this workspace before."""
    hours: float
    """The time of all planned runs of these cells, one after another."""
    rank_hours: float
    """The sum over these runs of hours times the number of ranks (with GPUs, these are GPU hours)."""


def count_repeats(file: MatrixFile, cells: Sequence[AnyCell], given_repeats: int | None) -> dict[str, int]:
    """The number of runs of each cell, by the name of the cell.

    file: the matrix file. given_repeats: the value of --repeats, which overrides the file; None if the option is not
    given.
    """
    if given_repeats is not None or isinstance(file.repeats, int):
        repeat_count = given_repeats or file.repeats
        assert isinstance(repeat_count, int)
        return dict.fromkeys((cell.name() for cell in cells), repeat_count)
    claimed_names = find_claimed_names(file, cells)
    return {
        cell_name: file.repeats.claims if cell_name in claimed_names else file.repeats.others
        for cell_name in (cell.name() for cell in cells)
    }


def find_claimed_names(file: MatrixFile, cells: Iterable[AnyCell]) -> set[str]:
    """The names of the cells that the claims of the matrix (sentences of a study that are tested) use in their tests."""
    metric_calls = (metric_call for claim in file.claims for _, metric_call in Expression(claim.test).call_arguments)
    cell_filters = [
        {key: value for key, value in metric_call.items() if key not in METRIC_ARGUMENTS} for metric_call in metric_calls
    ]
    return {
        cell.name()
        for cell in cells
        if any(matches_cell(msgspec.to_builtins(cell), cell_filter) for cell_filter in cell_filters)
    }


def order_runs_by_repeat(cells: Sequence[AnyCell], repeats_by_cell: Mapping[str, int]) -> list[tuple[AnyCell, int]]:
    """Every (cell, repeat), in the order in which they run: all first repeats, then all second repeats, and so on. In this
    order, a slow change of the machine's speed affects all cells in the same way."""
    cell_counts = [(cell, repeats_by_cell[cell.name()]) for cell in cells]
    last_repeat = max((repeat_count for _, repeat_count in cell_counts), default=0)
    return [
        (cell, repeat) for repeat in range(1, last_repeat + 1) for cell, repeat_count in cell_counts if repeat <= repeat_count
    ]


def describe_repeats(repeats_by_cell: Mapping[str, int], repeats_key: int | Repeats) -> str:
    """The number of runs as text, such as `13 cell(s) that claims name x 3 repeat(s) + 46 other(s) x 1 = 85 run(s)`.

    repeats_by_cell: the number of runs of each cell, by name. repeats_key: the key `repeats_by_cell` of the matrix.
    """
    run_count, distinct_counts = sum(repeats_by_cell.values()), set(repeats_by_cell.values())
    if isinstance(repeats_key, int) or len(distinct_counts) == 1:
        return f"{len(repeats_by_cell)} cell(s) x {max(distinct_counts)} repeat(s) = {run_count} run(s)"
    claimed_count = sum(repeat_count == repeats_key.claims for repeat_count in repeats_by_cell.values())
    other_count = len(repeats_by_cell) - claimed_count
    claims_text = f"{claimed_count} cell(s) that claims name x {repeats_key.claims} repeat(s)"
    return f"{claims_text} + {other_count} other(s) x {repeats_key.others} = {run_count} run(s)"


def compute_mean_recorded_s(
    workspace: Workspace, cells: Iterable[AnyCell], repeats_by_cell: Mapping[str, int], rehearsed_names: Container[str]
) -> dict[str, float]:
    """The mean duration in seconds of the completed runs of each cell, by the name of the cell. Cells without a completed run
    in this workspace are left out. rehearsed_names: the names of the cells that are planned as rehearsals; earlier rehearsals
    count only for these cells."""
    mean_s_by_cell = {}
    for cell in cells:
        run_dirs = (RunDir(workspace.runs / make_run_id(cell, repeat)) for repeat in range(1, repeats_by_cell[cell.name()] + 1))
        is_rehearsed = cell.name() in rehearsed_names
        durations_s = [
            run_s for run_dir in run_dirs if (run_s := _read_duration_s(run_dir, counts_rehearsals=is_rehearsed)) is not None
        ]
        if durations_s:
            mean_s_by_cell[cell.name()] = fmean(durations_s)
    return mean_s_by_cell


def estimate_cost(
    cells: Iterable[AnyCell], repeats_by_cell: Mapping[str, int], recorded_s: Mapping[str, float]
) -> EstimatedCost:
    """The estimated time of the runs of these cells. repeats_by_cell: the number of runs, by the name of the cell.
    recorded_s: the result of `compute_mean_recorded_s`."""
    measured_cells, hours, rank_hours = 0, 0.0, 0.0
    for cell in cells:
        if (mean_s := recorded_s.get(cell.name())) is not None:
            measured_cells += 1
            hours += repeats_by_cell[cell.name()] * mean_s / 3600
            rank_hours += repeats_by_cell[cell.name()] * cell.world_size * mean_s / 3600
    return EstimatedCost(measured_cells, hours, rank_hours)


def _read_duration_s(run_dir: RunDir, *, counts_rehearsals: bool) -> float | None:
    """The seconds from the start of a run to its end; None if the run has no result or its events cannot be read, or if it is
    a rehearsal and these do not count."""
    if not run_dir.result.exists() or (not counts_rehearsals and run_dir.is_rehearsal()):
        return None
    try:
        time_by_event = {event.event: event.wall_s for event in run_dir.read_events()}
    except ShardlabError:
        return None
    if not {"started", "exited"} <= time_by_event.keys() or time_by_event["exited"] < time_by_event["started"]:
        return None
    return time_by_event["exited"] - time_by_event["started"]
