"""Follows runs: waits until they end (submit --wait, cancel), shows a live table (status --watch), and prints their logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.scheduler import apart, scheduler
from jobs.status import search_runs, stale_jobs
from jobs.status.reconcile import Status, latest, own, statuses, unreadable_status
from jobs.submission import lease_report
from jobs.submission.backlog import Backlog
from jobs.verbs import status_table, views
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.runs.run import REHEARSAL, attempt_of
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL
from shardlab.terminal.console import Output
from shardlab.terminal.printable import LogText
from shardlab.workspace.workspace import Workspace, chosen

if TYPE_CHECKING:
    from rich.console import Group

LOGS_S = 0.5
LOG_PART = 2**20  # bytes of a log that are read at a time
CANCEL_S = 60.0  # the most seconds to wait for cancelled runs; supervisors and Slurm kill processes earlier than this


def finish(out: Output, workspace: Workspace, run_ids: Sequence[str], *, wait: bool, backlog: Backlog | None = None) -> int:
    """The last part of `jobs submit` and `jobs retry`: wait for the runs if asked to, and print how they ended.

    run_ids: the runs. wait: whether to wait until all runs have ended. backlog: the runs that the full scheduler did not
    accept; they are submitted while the command waits. Returns the exit code: 1 if a run did not end as expected.
    """

    if not wait and not out.json:
        return 0

    def look() -> list[Status]:
        return statuses(workspace, search_runs.with_tries(workspace, _last_attempts(workspace, run_ids)))

    if not wait:
        out.document({"runs": look()})
        return 0
    try:
        ended = _until_ended(out, workspace, look, backlog=backlog)
    finally:
        if backlog is not None and (unsent := backlog.unsent()):
            names = ", ".join(folder.run_id for folder in unsent[:3]) + (", ..." if len(unsent) > 3 else "")
            again = "Run the same command again to submit them."
            out.remark(f"{len(unsent)} run(s) are not submitted ({backlog.problem}): {names}. {again}")
        if backlog is not None and backlog.unanswered is not None:
            out.remark(str(backlog.unanswered))
    out.line(status_table.summary(ended))
    stopped = search_runs.stopped(workspace, ended)
    for path in search_runs.paths(workspace, ended):
        again = " No process goes on with it: `jobs submit` does." if path in stopped else ""
        out.line(f"{search_runs.sentence(path)}{again}", style="red" if again else None)
    given_back: dict[str, list[str]] = {}
    for run in ended:
        if (run.state == "planned" or run.held) and run.why:
            given_back.setdefault(run.why, []).append(run.id)
        elif not run.expected and not run.is_unreadable:  # runs with unreadable records have been printed already
            out.line(f"{run.id}: {run.state}: {run.why}", style="red")
    for why, runs in given_back.items():
        names = ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")
        out.line(f"{len(runs)} run(s) did not start ({names}): {why}.", style="red")
    cancelled = stale_jobs.cancel(ended)
    for sentence in cancelled.sentences:
        out.remark(sentence)
    out.document({"runs": ended})
    return 0 if cancelled.all_gone and not stopped and all(run.expected for run in ended) else 1


def status(out: Output, workspace: Workspace, look: Callable[[], list[Status]]) -> list[Status]:
    """Carry out `jobs status --watch`: show a live table until all runs have ended or the user presses Ctrl-C.

    look: reads the statuses of the runs. This function starts no runner. Returns the last statuses.
    """
    runs = _until_ended(out, workspace, look, restart=False)
    views.status(out, runs, workspace, lease_report.of_workspace(workspace, datetime.now(UTC)))
    return runs


def cancel(workspace: Workspace, runs: Sequence[Status]) -> list[Status]:
    """Cancel runs, wait until they have ended (at most CANCEL_S seconds), and return their statuses."""
    folders = [RunDir(workspace.runs / run.id) for run in runs]
    for name, known in apart(own(folder) for folder in folders).items():
        scheduler(name).cancel(workspace, known)
    deadline = time.monotonic() + CANCEL_S
    while True:
        now = statuses(workspace, folders)
        if all(run.state in FINAL for run in now):
            following = _last_attempts(workspace, [run.id for run in now])
            tries = statuses(workspace, search_runs.with_tries(workspace, following))
            further = [run for run in tries if run.state not in FINAL and run.cell is not None]
            return [*now, *(cancel(workspace, further) if further else [])]  # tries and attempts that began in the meantime
        if time.monotonic() > deadline:
            return now
        time.sleep(_poll_s(now))


def _last_attempts(workspace: Workspace, run_ids: Sequence[str]) -> list[RunDir]:
    """The folders of the last attempts at these runs, in order: a run may have been started again meanwhile
    (jobs.supervisor.retries)."""
    last = {attempt_of(folder.run_id)[0]: folder for folder in latest(workspace.all_runs())}
    return [last[attempt_of(run_id)[0]] for run_id in run_ids]


def logs(out: Output, workspace: Workspace, pattern: str, rank: int | None, *, follow: bool) -> int:
    """Print the log of one run; return the exit code.

    pattern: a run id or a shell pattern that matches one run. rank: the rank whose log is printed; None: the log of the
    launcher, then the log of rank 0. follow: whether to print new output until the run has ended. If the records of the run
    cannot be read, its logs are still printed, and the exit code is 1.
    """
    matches = chosen(workspace.run_ids(), [pattern])
    if len(matches) > 1:
        raise InputError(f"{pattern!r} matches {len(matches)} runs: {', '.join(matches[:5])}. Allowed: one run.")
    folder = RunDir(workspace.runs / matches[0])
    damaged = unreadable_status(folder)
    if damaged is not None:
        out.remark(f"{damaged.id}: {damaged.why}", style="red")
    elif rank is not None and not 0 <= rank < (world := folder.read_run().world.world_size):
        raise InputError(f"--rank: found {rank}. Allowed: 0 to {world - 1}.")
    if folder.is_rehearsal():
        out.remark(f"note: {folder.run_id} is a {REHEARSAL}.")
    files = [folder.rank_log(rank)] if rank is not None else [folder.job_log, folder.rank_log(0)]
    places = dict.fromkeys(files, 0)
    texts = {file: LogText() for file in files}
    while True:
        ended = damaged is not None or folder.judge().state not in ("pending", "running")
        for file in files:
            places[file] = _print_from(out, file, places[file], texts[file])
        if not follow or ended:
            return int(damaged is not None)
        time.sleep(LOGS_S)


def _until_ended(
    out: Output, workspace: Workspace, look: Callable[[], list[Status]], *, restart: bool = True, backlog: Backlog | None = None
) -> list[Status]:
    """Poll until all runs have ended or are held. On a terminal, show a live table; otherwise print a line for each change.

    look: reads the statuses of the runs. restart: whether to start a new runner if the runner of a queue is gone. backlog: runs
    that are submitted while the command waits. Returns the last statuses.
    """
    runs, sent = look(), False
    if out.results.is_terminal and not out.json:
        from rich.live import Live

        console = out.results.console
        with Live(_draw_live_table(runs, *console.size), console=console, auto_refresh=False) as screen:
            while backlog or sent or not _ended(runs):
                _rest(workspace, runs, restart=restart)
                runs, sent = _looked(look, backlog)
                screen.update(_draw_live_table(runs, *console.size), refresh=True)
        return runs
    before: dict[str, str] = {}
    while True:
        for run in runs:
            # Runs that a queue returned, so that they are `planned` again, are printed together in one sentence at the end.
            if before.get(run.id) != run.state and not (run.state == "planned" and run.id in before):
                out.line(f"{run.id}: {run.state}" + (f": {run.why}" if run.why else ""))
            before[run.id] = run.state
        if _ended(runs) and not backlog and not sent:
            return runs
        _rest(workspace, runs, restart=restart)
        runs, sent = _looked(look, backlog)


def _looked(look: Callable[[], list[Status]], backlog: Backlog | None) -> tuple[list[Status], bool]:
    """Read the statuses, then submit runs of the backlog. Returns (the statuses, whether runs were submitted); if runs were
    submitted, the statuses are out of date."""
    runs = look()
    if not backlog:
        return runs, False
    before = len(backlog.folders)
    backlog.attend(runs)
    return runs, len(backlog.folders) < before


def _ended(runs: Sequence[Status]) -> bool:
    return not any(run.state in ("pending", "running") and not run.held for run in runs)


def _rest(workspace: Workspace, runs: Sequence[Status], *, restart: bool) -> None:
    if restart and any(run.state == "pending" for run in runs):
        for name in {run.scheduler["name"] for run in runs if run.state == "pending"}:
            scheduler(name).attend(workspace)
    time.sleep(_poll_s(runs))


def _poll_s(runs: Sequence[Status]) -> float:
    """The seconds between two questions about these runs: the longest interval (POLL_S) of their schedulers."""
    names = {run.scheduler["name"] for run in runs} - {"-"}
    return max((scheduler(name).POLL_S for name in names), default=LOGS_S)


def _print_from(out: Output, file: Path, place: int, log: LogText) -> int:
    """Print the log from byte `place` to its end; return the place of the byte after the last printed byte.

    log: decodes the bytes of this log.
    """
    if not file.exists():
        return place
    with files.open_regular(file) as handle:
        handle.seek(place)
        while part := handle.read(LOG_PART):
            out.log(log, part)
            place += len(part)
    return place


def _draw_live_table(runs: Sequence[Status], width: int, height: int) -> Group:
    """The live table of --watch and --wait, drawn for a terminal of this size (in characters and lines)."""
    from rich.console import Group

    from shardlab.terminal.rich_console import drawn_table

    shown = status_table.table(runs, width, height)
    table = drawn_table(shown.columns, shown.rows, shown.styles)
    more = f" {shown.left_out} of them not shown." if shown.left_out else ""
    return Group(table, status_table.summary(runs) + more)
