"""Starts the next try of a search in the job of the try that has ended.

    python -m jobs.supervisor.next_try RUN_DIR CODE

When a try has ended with the exit code CODE, its supervisor (jobs.supervisor.attempt) replaces itself (exec) by this program,
which replaces itself by the script of the next try. So all tries of a search run in one allocation, one after another: Slurm
sees one job, and a runner sees one process. The records of the tries decide which try is next. So, if the process of a search
was killed, the search continues at the same try: with `jobs submit`, with `jobs retry`, or when Slurm starts the job again.

Exit codes: 0 if the search has ended, otherwise CODE.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from jobs import claim
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.hardware import host
from shardlab.runs import search_path
from shardlab.runs.run import Run, make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.runs.search_path import SearchPath
from shardlab.runs.state import find_last_sending
from shardlab.terminal import console
from shardlab.workspace.workspace import Workspace

SEARCH_KEY = "search"  # key in the data of the event `started`: the process starts further tries after this run
# An environment variable of the script of a try: the run id of a try that this program has claimed for the script, or AGAIN.
# In the script that the scheduler started, the variable is not set.
TRY_VARIABLE = "SHARDLAB_TRY"
CLAIM_AGAIN = "-"  # the try was interrupted by a restart of the job, and may have to be claimed again


def is_claimed(run_dir: RunDir) -> bool:
    """Whether the run is a try of a search that `jobs.supervisor.next_try` has claimed for this process."""
    return os.environ.get(TRY_VARIABLE) == run_dir.run_id


def replace_process(run_dir: RunDir, exit_code: int) -> None:
    """Replace this process (exec) by the process that starts the next try. Returns only if a later start of the job has taken
    over the try.

    run_dir: the folder of the try that has ended, or that this process could not claim. exit_code: the exit code of the try's
    supervisor.
    """
    if claim.is_taken_over(run_dir):
        return
    os.execv(sys.executable, [sys.executable, "-m", "jobs.supervisor.next_try", str(run_dir.path), str(exit_code)])


def main(argv: list[str]) -> int:
    """Start the next try; return the exit code if there is no next try. argv: RUN_DIR CODE. Raises ShardlabError."""
    if len(argv) != 2 or not argv[1].isdecimal():
        raise InputError("usage: python -m jobs.supervisor.next_try RUN_DIR CODE")
    run_dir, exit_code = RunDir(Path(argv[0]).absolute()), int(argv[1])
    run = run_dir.read_run()
    if run.search is None:
        raise InputError(f"{run_dir.path}: the run is no try of a search.")
    path = search_path.follow_search(run_dir.path.parent, run.training_cell, run.search, run.repeat)
    if path.has_ended:
        _print_search(path, path.answer_text)
        return 0
    if path.next_size is None:
        last_try = RunDir(run_dir.path.parent / path.tries[-1].run)
        if claim.count_job_restarts() and TRY_VARIABLE not in os.environ and claim.is_claimed_by_job(last_try):
            _replace_by_script(last_try, CLAIM_AGAIN)
        _print_search(path, f"waits for the try {last_try.run_id}, which is {path.tries[-1].state}")
        return exit_code
    if _was_cancelled(run_dir):
        _print_search(path, "was cancelled")
        return exit_code
    _replace_by_script(_render_next_try(run_dir, run, path), None)
    return exit_code


def _render_next_try(run_dir: RunDir, run: Run, path: SearchPath) -> RunDir:
    """Create the folder of the next try and claim the try for this process. Returns the folder. Raises ShardlabError.

    folder, run: the folder and the run.json of the previous try. path: all tries of the search so far.
    """
    # These imports are not at the top of the file, because the supervisor imports this module and does not need them.
    from jobs.planning import plan_predictions
    from jobs.rendering import render, render_again

    cell = path.current_cell
    next_run = msgspec.structs.replace(
        run,
        run_id=make_run_id(cell, run.repeat),
        cell=cell,
        cell_hash=cell.hash(),
        attempt=1,
        resume=[],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    render_context = render_again.read_render_context(run_dir, next_run)
    # In this process, the planner knows no plug-ins of the workspace, so it cannot predict a cell that uses a plug-in.
    if cell.workload_code is None and cell.strategy_code is None:
        predictions = plan_predictions.predict_cells(Workspace(run_dir.path.parent.parent), render_context.cluster, [cell], {})
        render_context = msgspec.structs.replace(render_context, predictions=predictions)
    sending = find_last_sending(run_dir.read_events())
    sending_data = sending.data if sending is not None else {}
    submission_data: dict[str, Any] = {
        key: sending_data[key] for key in ("scheduler", "token", "job", "cluster") if key in sending_data
    }
    submission_data |= host.identify_this_process()

    def claim_new(new_run_dir: RunDir) -> None:
        claim.claim_run(new_run_dir)
        new_run_dir.write_event("search", "submitted", **submission_data)

    return render.write_run_folder(next_run, run_dir.path.parent, render_context, prepare=claim_new)


def _was_cancelled(run_dir: RunDir) -> bool:
    """Whether a person cancelled the try after its last start, but too late to end the try."""
    events = run_dir.read_events()
    last_start_s = max((event.wall_s for event in events if event.event == "started"), default=0.0)
    return any(event.event == "cancel_requested" and event.wall_s > last_start_s for event in events)


def _replace_by_script(run_dir: RunDir, claim_word: str | None) -> None:
    """Replace this process by the script of a try. claim_word: CLAIM_AGAIN if the script must claim the try itself; None if
    the try is already claimed for this process."""
    from jobs.scheduler import find_scheduler

    os.environ[TRY_VARIABLE] = claim_word or run_dir.run_id
    first_path, _, other_paths = os.environ.get("PYTHONPATH", "").partition(":")
    if first_path and first_path == os.environ.get("SHARDLAB_SOURCE"):  # the script adds this folder to PYTHONPATH again
        os.environ["PYTHONPATH"] = other_paths
    run_dir.log.mkdir(exist_ok=True)
    with files.open_append(run_dir.log / "script.log") as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    os.execvp("bash", ["bash", str(run_dir.path / find_scheduler(run_dir.read_run().scheduler).SCRIPT)])


def _print_search(path: SearchPath, outcome: str) -> None:
    print(f"search of {path.search.description}: {path.description}: {outcome}.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(console.run_command(lambda: main(sys.argv[1:])))
