"""Merges the summaries that the runs of `jobs trace` wrote into one list. Each of these runs reads a part of a folder of
traces."""

from __future__ import annotations

from collections.abc import Mapping

from collect.traces.file_figures import FileFigures, sort_by_rank
from shardlab.errors import InputError, ShardlabError
from shardlab.files import json_file
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.runs.trace_part import SET_NAME, SUMMARIES_FOLDER, TracePart, summary_name
from shardlab.workspace.workspace import Workspace

_MOST_NAMED_RUNS = 5  # the most runs that a message names


def merge_figures(workspace: Workspace, set_name: str) -> list[FileFigures] | None:
    """The figures (numbers) of all traces that the runs of the set `set_name` analysed, sorted by rank; None if there is no
    such run.

    The result is the same as if one machine had analysed the whole folder. Raises InputError if a part of the folder has not
    been analysed completely, or if a summary cannot be read.
    """
    latest_runs = _find_latest_runs(workspace, set_name) if SET_NAME.fullmatch(set_name) else {}
    if not latest_runs:
        return None
    part_count = next(iter(latest_runs.values()))[2].parts
    missing_parts = sorted(set(range(part_count)) - latest_runs.keys())
    if missing_parts:
        raise InputError(f"{set_name}: {len(missing_parts)} of {part_count} parts have no run. `jobs trace` submits them.")
    unfinished_ids = [folder.run_id for folder, _, _ in latest_runs.values() if folder.judge().state != "completed"]
    if unfinished_ids:
        run_ids = ", ".join(unfinished_ids[:_MOST_NAMED_RUNS])
        more_text = f" and {len(unfinished_ids) - _MOST_NAMED_RUNS} more" if len(unfinished_ids) > _MOST_NAMED_RUNS else ""
        raise InputError(
            f"{set_name}: {len(unfinished_ids)} of {part_count} parts have not completed: {run_ids}{more_text}. `jobs status` "
            "says why; on a remote cluster, `collect fetch` copies the runs first."
        )
    return sort_by_rank(
        [
            summary
            for part_number in range(part_count)
            for summary in _read_summaries(latest_runs[part_number][0], latest_runs[part_number][2])
        ]
    )


def _find_latest_runs(workspace: Workspace, set_name: str) -> Mapping[int, tuple[RunDir, Run, TracePart]]:
    """The latest run for each part of the folder of traces: {number of the part: (run folder, run.json, traces of the part)}.

    set_name: the name of the set of runs. Runs whose records cannot be read are left out.
    """
    latest_runs: dict[int, tuple[RunDir, Run, TracePart]] = {}
    for run_dir in workspace.all_runs():
        try:
            run = run_dir.read_run()
        except ShardlabError:
            continue
        if run.traces is None or run.matrix != set_name:
            continue
        earlier = latest_runs.get(run.traces.place)
        if earlier is None or earlier[1].attempt < run.attempt:
            latest_runs[run.traces.place] = (run_dir, run, run.traces)
    return latest_runs


def _read_summaries(run_dir: RunDir, trace_part: TracePart) -> list[FileFigures]:
    summaries = []
    for file_number in range(len(trace_part.files)):
        summary_path = run_dir.path / SUMMARIES_FOLDER / summary_name(file_number)
        summary = json_file.read_json(summary_path, FileFigures, "is not a summary of this version: {}.")
        if summary is None:
            raise InputError(f"{summary_path}: the summary is missing, although the run completed.")
        summaries.append(summary)
    return summaries
