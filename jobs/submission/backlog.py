"""Submits the runs that a full scheduler did not accept, as soon as the scheduler has room (`jobs submit --wait`).

After each failed try, the wait before the next try doubles.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from jobs.scheduler import SchedulerFull, SubmitOptions, find_scheduler
from jobs.slurm.commands import ControllerUnreachable
from jobs.status.reconcile import Status, find_blocking_status
from jobs.submission import lease_schedule
from shardlab.errors import ShardlabError
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL_STATES
from shardlab.workspace.workspace import Workspace

LONGEST_PAUSE_S = 600.0  # the longest wait after a failed try, in seconds


class Backlog:
    """The runs that a waiting command still has to submit.

    folders: the folders of these runs. problem: why the last try did not submit all of them. unanswered: the error of a
    submission after which it is unknown whether Slurm accepted the job; None if there is no such submission.
    """

    def __init__(self, workspace: Workspace, scheduler_name: str, submit_options: SubmitOptions, full: SchedulerFull) -> None:
        """Take over the runs that a scheduler did not accept.

        scheduler_name: the name of the scheduler. submit_options: the options with which the runs are submitted. full_error:
        the exception that the scheduler raised, with the runs that it did not accept."""
        self.folders = full.unsubmitted
        self.problem = full.why
        self._workspace = workspace
        self._scheduler = find_scheduler(scheduler_name)
        self._options = submit_options
        self.unanswered: ControllerUnreachable | None = None
        self._given_up = False
        self._ended_count: int | None = None  # number of runs of this command that had ended at the last call of `attend`
        self._freed_places = 0  # places in the queue that runs of this command freed when they ended, and that are still free
        self._guessed_places = 1  # places that jobs of other users may have freed; doubles after each successful try
        self._freed_pause, self._guess_pause = _Pause(self._scheduler.POLL_S), _Pause(self._scheduler.POLL_S)

    def __bool__(self) -> bool:
        return (bool(self.folders) or self.unanswered is not None) and not self._given_up

    def submit_more_runs(self, statuses: Sequence[Status]) -> None:
        """Submit as many runs as have ended since the last call. From time to time, try to submit further runs, because jobs of
        other users may have ended too. At most `at_once` runs are submitted and unfinished at a time.

        statuses: the status of all runs of this command.
        """
        # another command may have submitted or cancelled the other runs
        planned_ids = {status.id for status in statuses if status.state == "planned"}
        self.folders = [run_dir for run_dir in self.folders if run_dir.run_id in planned_ids]
        ended_count = sum(status.state in FINAL_STATES for status in statuses)
        self._freed_places += ended_count - (ended_count if self._ended_count is None else self._ended_count)
        self._ended_count = ended_count
        most_new_runs = len(self.folders)
        if self._options.is_packed:
            self._freed_places, self._guessed_places = 0, most_new_runs  # with --pack, all runs together need only one job
        elif self._options.most_runs is not None:
            unfinished_count = sum(status.state in ("pending", "running") for status in statuses)
            most_new_runs = max(0, min(most_new_runs, self._options.most_runs - unfinished_count))
        if (target_count := min(self._freed_places, most_new_runs)) > 0 and self._freed_pause.is_over():
            sent_count = self._submit_next_runs(target_count)
            self._freed_places -= sent_count
            most_new_runs -= sent_count
            self._freed_pause.start_again(has_failed=sent_count < target_count)
            if sent_count < target_count:
                return
        if ((target_count := min(self._guessed_places, most_new_runs)) > 0 or self.unanswered) and self._guess_pause.is_over():
            sent_count = self._submit_next_runs(target_count)
            self._guessed_places = 2 * target_count if sent_count == target_count else 1
            self._guess_pause.start_again(has_failed=sent_count < target_count)

    def list_unsent_runs(self) -> list[RunDir]:
        """The runs that no command has submitted, cancelled or held back so far. Runs with unreadable records are left out."""
        readable_runs = ((run_dir, run_dir.judge()) for run_dir in self.folders if find_blocking_status(run_dir) is None)
        return [run_dir for run_dir, verdict in readable_runs if verdict.state == "planned" and not verdict.held]

    def _submit_next_runs(self, target_count: int) -> int:
        """Submit the first `target_count` runs; return how many of them the scheduler accepted."""
        try:
            with self._workspace.hold_runs_lock():
                self._scheduler.finish_interrupted(self._workspace)
                self.unanswered = None
                self.folders = self.list_unsent_runs()
                if not self._options.ignore_lease:
                    self.folders = lease_schedule.hold_late_folders(
                        self._workspace, self.folders, target_count, pack=self._options.is_packed
                    )
                next_runs, later_runs, unsubmitted = self.folders[:target_count], self.folders[target_count:], list[RunDir]()
                try:
                    if next_runs:
                        self._scheduler.submit(
                            self._workspace, next_runs, msgspec.structs.replace(self._options, most_runs=None)
                        )
                except SchedulerFull as full_error:
                    self.problem, unsubmitted = full_error.why, full_error.unsubmitted
                self.folders = unsubmitted + later_runs
                return len(next_runs) - len(unsubmitted)
        except ControllerUnreachable as outage:
            self.problem, self.unanswered = f"Slurm does not answer: {outage.why}", outage
        except ShardlabError as error:
            self.problem, self._given_up = str(error), True
        return 0


class _Pause:
    """The wait between two tries: least_s seconds after a successful try, twice the previous wait after a failed try."""

    def __init__(self, least_s: float) -> None:
        self._least_s = self._wait_s = least_s
        self._until_s = time.monotonic() + least_s

    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s

    def start_again(self, *, has_failed: bool) -> None:
        self._wait_s = min(LONGEST_PAUSE_S, 2 * self._wait_s) if has_failed else self._least_s
        self._until_s = time.monotonic() + self._wait_s
