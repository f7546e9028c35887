"""Follows runs: waits until they end (submit --wait, cancel), shows a live table (status --watch)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jobs.scheduler import find_scheduler, group_by_scheduler
from jobs.status import search_runs, stale_jobs
from jobs.status.reconcile import Status, read_run_on_disk, read_statuses, select_last_attempts
from jobs.submission.backlog import Backlog
from jobs.verbs import status_table, views
from shardlab.runs.run import split_attempt
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL_STATES
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

LEAST_POLL_S = 0.5
PIPE_INTERVAL_S = 15.0  # the least seconds between two lines of progress in a pipe, unless a run fails
MOST_CANCEL_S = 60.0  # the most seconds to wait for cancelled runs; supervisors and Slurm kill processes earlier than this


def wait_and_report(
    out: Output, workspace: Workspace, run_ids: Sequence[str], *, wait: bool, backlog: Backlog | None = None
) -> int:
    """The last part of `jobs submit` and `jobs retry`: wait for the runs if asked to, and print how they ended.

    run_ids: the runs. wait: whether to wait until all runs have ended. backlog: the runs that the full scheduler did not
    accept; they are submitted while the command waits. Returns the exit code: 1 if a run did not end as expected.
    """

    if not wait and not out.json:
        return 0

    def read_current_statuses() -> list[Status]:
        return read_statuses(workspace, search_runs.add_tries(workspace, _find_last_attempts(workspace, run_ids)))

    if not wait:
        out.print_document({"runs": read_current_statuses()})
        return 0
    try:
        ended_statuses = _wait_until_ended(out, workspace, read_current_statuses, backlog=backlog)
    finally:
        if backlog is not None and (unsent_runs := backlog.list_unsent_runs()):
            run_names = ", ".join(folder.run_id for folder in unsent_runs[:3]) + (", ..." if len(unsent_runs) > 3 else "")
            hint = "Run the same command again to submit them."
            out.print_remark(f"{len(unsent_runs)} run(s) are not submitted ({backlog.problem}): {run_names}. {hint}")
        if backlog is not None and backlog.unanswered is not None:
            out.print_remark(str(backlog.unanswered))
    out.print_line(status_table.summarize_runs(ended_statuses))
    stopped_searches = search_runs.find_stopped_searches(workspace, ended_statuses)
    for search_path in search_runs.read_search_paths(workspace, ended_statuses):
        hint = " No process goes on with it: `jobs submit` does." if search_path in stopped_searches else ""
        out.print_line(f"{search_runs.describe_search(search_path)}{hint}", style="red" if hint else None)
    ids_by_reason: dict[str, list[str]] = {}
    for run in ended_statuses:
        if (run.state == "planned" or run.held) and run.why:
            ids_by_reason.setdefault(run.why, []).append(run.id)
        elif not run.expected and not run.is_unreadable:  # runs with unreadable records have been printed already
            out.print_line(f"{run.id}: {run.state}: {run.why}", style="red")
    for reason, runs in ids_by_reason.items():
        run_names = ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")
        out.print_line(f"{len(runs)} run(s) did not start ({run_names}): {reason}.", style="red")
    cancelled = stale_jobs.cancel_stale_jobs(ended_statuses)
    for sentence in cancelled.sentences:
        out.print_remark(sentence)
    out.print_document({"runs": ended_statuses})
    return 0 if cancelled.are_all_cancelled and not stopped_searches and all(run.expected for run in ended_statuses) else 1


def watch_status(out: Output, workspace: Workspace, read_current_statuses: Callable[[], list[Status]]) -> list[Status]:
    """Carry out `jobs status --watch`: show a live table until all runs have ended or the user presses Ctrl-C.

    read_current_statuses: reads the statuses of the runs. This function starts no runner. Returns the last statuses.
    """
    last_statuses = _wait_until_ended(out, workspace, read_current_statuses, restarts_runners=False)
    views.print_status(out, last_statuses, workspace)
    return last_statuses


def cancel_runs(workspace: Workspace, statuses: Sequence[Status]) -> list[Status]:
    """Cancel runs, wait until they have ended (at most MOST_CANCEL_S seconds), and return their statuses."""
    run_dirs = [RunDir(workspace.runs / run.id) for run in statuses]
    for name, runs_on_disk in group_by_scheduler(read_run_on_disk(run_dir) for run_dir in run_dirs).items():
        find_scheduler(name).cancel(workspace, runs_on_disk)
    deadline = time.monotonic() + MOST_CANCEL_S
    while True:
        current_statuses = read_statuses(workspace, run_dirs)
        if all(run.state in FINAL_STATES for run in current_statuses):
            last_folders = _find_last_attempts(workspace, [run.id for run in current_statuses])
            tried_runs = read_statuses(workspace, search_runs.add_tries(workspace, last_folders))
            unfinished_tries = [run for run in tried_runs if run.state not in FINAL_STATES and run.cell is not None]
            # the second list: tries and attempts that began in the meantime
            return [*current_statuses, *(cancel_runs(workspace, unfinished_tries) if unfinished_tries else [])]
        if time.monotonic() > deadline:
            return current_statuses
        time.sleep(_find_poll_s(current_statuses))


def _find_last_attempts(workspace: Workspace, run_ids: Sequence[str]) -> list[RunDir]:
    """The folders of the last attempts at these runs, in order: a run may have been started again meanwhile
    (jobs.supervisor.retries)."""
    last_by_first_id = {
        split_attempt(run_dir.run_id)[0]: run_dir for run_dir in select_last_attempts(workspace.list_run_dirs())
    }
    return [last_by_first_id[split_attempt(run_id)[0]] for run_id in run_ids]


def _wait_until_ended(
    out: Output,
    workspace: Workspace,
    read_current_statuses: Callable[[], list[Status]],
    *,
    restarts_runners: bool = True,
    backlog: Backlog | None = None,
) -> list[Status]:
    """Poll until all runs have ended or are held. On a terminal, show one line of progress, or the live table of --watch;
    otherwise print lines of progress.

    read_current_statuses: reads the statuses of the runs. restarts_runners: whether to start a new runner if the runner of a
    queue is gone; False for --watch. backlog: runs that are submitted while the command waits. Returns the last statuses."""
    statuses, has_sent = read_current_statuses(), False
    progress = WaitProgress(statuses)

    def draw() -> RenderableType:
        return progress.describe(statuses) if restarts_runners else _draw_live_table(statuses, *out.results.console.size)

    with contextlib.ExitStack() as stack:
        screen = None
        if out.results.is_terminal and not out.json:
            from rich.live import Live

            screen = stack.enter_context(Live(draw(), console=out.results.console, auto_refresh=False))
        while backlog or has_sent or not _have_ended(statuses):
            _wait_to_poll(workspace, statuses, restarts_runners=restarts_runners)
            statuses, has_sent = _read_and_submit(read_current_statuses, backlog)
            if screen is not None:
                screen.update(draw(), refresh=True)
            elif progress.is_news(statuses):
                out.print_line(progress.describe(statuses))
    return statuses


class WaitProgress:
    """The progress of runs since a command began to wait for them."""

    def __init__(self, runs: Sequence[Status]) -> None:
        self._begin_s = self._printed_s = time.monotonic()
        self._ended_before = sum(run.state in FINAL_STATES for run in runs)
        self._printed_counts = self._count(runs)

    def describe(self, statuses: Sequence[Status]) -> str:
        """A line with the number of runs that ended, failed and run. After the first end, it also has the rate and the time
        left, which assumes that the other runs end at the same rate."""
        ended_count, bad_count, running_count = self._count(statuses)
        clauses = [f"{ended_count} of {len(statuses)} run(s) ended", f"{bad_count} failed", f"{running_count} running"]
        waited_s, new_count = time.monotonic() - self._begin_s, ended_count - self._ended_before
        if new_count > 0 and waited_s > 0:
            left_s = (len(statuses) - ended_count) * waited_s / new_count
            clauses += [f"{60 * new_count / waited_s:.2g} per minute", f"about {moments.format_duration(left_s)} left"]
        return ", ".join(clauses)

    def is_news(self, statuses: Sequence[Status]) -> bool:
        """Whether a pipe gets a line now: if a run failed, or if anything changed and PIPE_INTERVAL_S seconds have passed."""
        counts, current_s = self._count(statuses), time.monotonic()
        has_failure = counts[1] > self._printed_counts[1]
        if counts == self._printed_counts or not (has_failure or current_s - self._printed_s >= PIPE_INTERVAL_S):
            return False
        self._printed_s, self._printed_counts = current_s, counts
        return True

    def _count(self, statuses: Sequence[Status]) -> tuple[int, int, int]:
        """How many runs have ended, how many of these not as expected, and how many are running."""
        ended_runs = [run for run in statuses if run.state in FINAL_STATES]
        return len(ended_runs), sum(not run.expected for run in ended_runs), sum(run.state == "running" for run in statuses)


def _read_and_submit(read_current_statuses: Callable[[], list[Status]], backlog: Backlog | None) -> tuple[list[Status], bool]:
    """Read the statuses, then submit runs of the backlog. Returns (the statuses, whether runs were submitted); if runs were
    submitted, the statuses are out of date."""
    statuses = read_current_statuses()
    if not backlog:
        return statuses, False
    count_before = len(backlog.folders)
    backlog.submit_more_runs(statuses)
    return statuses, len(backlog.folders) < count_before


def _have_ended(statuses: Sequence[Status]) -> bool:
    return not any(run.state in ("pending", "running") and not run.held for run in statuses)


def _wait_to_poll(workspace: Workspace, statuses: Sequence[Status], *, restarts_runners: bool) -> None:
    if restarts_runners and any(run.state == "pending" for run in statuses):
        for name in {run.scheduler["name"] for run in statuses if run.state == "pending"}:
            find_scheduler(name).restart_lost_runner(workspace)
    time.sleep(_find_poll_s(statuses))


def _find_poll_s(statuses: Sequence[Status]) -> float:
    """The seconds between two questions about these statuses: the longest interval (POLL_S) of their schedulers."""
    scheduler_names = {run.scheduler["name"] for run in statuses} - {"-"}
    return max((find_scheduler(scheduler_name).POLL_S for scheduler_name in scheduler_names), default=LEAST_POLL_S)


def _draw_live_table(statuses: Sequence[Status], width: int, height: int) -> Group:
    """The live table of --watch, drawn for a terminal of this size (in characters and lines)."""
    from rich.console import Group

    from shardlab.terminal.rich_console import draw_table

    table = status_table.make_table(statuses, width, height)
    hidden_count = len(statuses) - len(table.rows)
    hidden_note = f" {hidden_count} of them not shown." if hidden_count else ""
    return Group(draw_table(table), status_table.summarize_runs(statuses) + hidden_note)
