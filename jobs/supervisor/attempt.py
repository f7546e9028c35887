"""The supervisor of one attempt at a run: claims the run, starts telemetry and ranks, enforces the time limit, and
records how the run ended.

    python -m jobs.supervisor.attempt RUN_DIR -- COMMAND...

In a Slurm job, COMMAND is a job step over all nodes of the run, and each task of the step starts telemetry on its node
(jobs.supervisor.step_task). On nodes without Slurm, jobs.ssh.step takes the place of the job step.

Exit codes: the exit code of COMMAND, or
    75   another process has already claimed the run
    76   the installed packages changed since the run was submitted, so the run is held (jobs.supervisor.hold); or the run's
copy of
         shardlab's source is damaged, so the state of the run is `planned` again
    124  the run reached its time limit, or its ranks hung
    127  the command is not installed
    143  the run was told to end, by SIGTERM or by `jobs cancel`
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from jobs import claim
from jobs.launcher import find_launcher
from jobs.node import node_processes, rendezvous, wait_for_gpus
from jobs.node.hang_detection import HangWatch
from jobs.slurm import allocation, query, states
from jobs.slurm.commands import OutageWatch, is_controller_down, read_own_cluster, remove_job_variables
from jobs.ssh import node_folders, step
from jobs.status import retry_budget
from jobs.supervisor import hold, next_try, retries
from jobs.supervisor.failure_cause import find_failure_cause
from shardlab.cluster import container
from shardlab.errors import InputError, ShardlabError, WorkspaceError
from shardlab.files import files, source_digest
from shardlab.hardware import host
from shardlab.runs import command_run, suspension
from shardlab.runs.run import SAVE_AT
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import TOLD_REASON
from shardlab.terminal import console

CLAIMED_CODE, OUT_OF_TIME_CODE, NOT_FOUND_CODE, TOLD_TO_END_CODE = 75, 124, 127, 143
PACKAGES_CHANGED_CODE = 76
RESUBMIT_HINT = "`jobs submit` or `jobs retry` submits it with the packages and the source that are installed now"
DAMAGED_WHY = (
    f"shardlab's source in {{root}} (digest {{now}}) is not the copy {{then}} that the run was submitted "
    f"with: the copy was changed, or the script does not use it; {RESUBMIT_HINT}"
)
OLD_WHY = f"the run was rendered by an earlier version of shardlab, which kept no copy of its source; {RESUBMIT_HINT}"
# Ranks that keep checkpoints save the last checkpoint LAST_SAVE_S seconds before the time limit, or, if the limit is short,
# when the share LAST_SAVE_SHARE of the limit is left.
LAST_SAVE_S, LAST_SAVE_SHARE = 60.0, 0.2
CANCELLED_WHY = "cancelled while it ran"
# Slurm sends the same signal to the batch step for four reasons: the time limit, a preemption, a failed node, and a person who
# cancels the job. Only Slurm knows the reason. Until Slurm reports the reason, the run counts as failed.
TOLD_TO_END_WHY = "Slurm told the run to end (SIGTERM)"
SLURM_CHECK_INTERVAL_S = 5.0  # seconds between two checks whether the controller answers again
# seconds between two checks whether another process cancelled the run or took it over (files in the run's folder)
LOOK_INTERVAL_S = 1.0
# A start after a requeue waits this long. In this time, an earlier start that still runs on a lost node notices the new start.
OVERLAP_S = 3 * LOOK_INTERVAL_S


class AttemptSupervisor:
    """Supervises one start of one run, from the claim of the run to its last event."""

    def __init__(self, run_dir: RunDir, command: list[str]) -> None:
        self.run_dir = run_dir
        self.command = command
        self.run = run_dir.read_run()
        self.is_in_slurm = self.run.scheduler in ("slurm", "allocation")
        self.starts_ranks_here = self.run.scheduler == "local"  # otherwise a job step starts the ranks on each node
        self.sampler: node_processes.SamplerProcess | None = None  # set while ranks run on this machine
        self.tracker: node_processes.TrackerProcess | None = None
        self.is_told_to_end = False  # whether SIGTERM told this process to end
        # This start ignores requests to cancel that are older than `begun`. A new try of a search ignores no request, because
        # nothing started the try before.
        self.start_wall_s = 0.0 if next_try.is_claimed(run_dir) else time.time()
        self.limit_s = self.run.limit_s or self.run.cell.time_limit_s
        self.deadline_s: float | None = None  # end of the time limit (monotonic clock); None until the limit begins to count
        self.next_look_s = 0.0  # when to check the run's folder again (monotonic clock)
        self.outage_watch = OutageWatch()
        self.saved_step = 0  # the step of the newest checkpoint when this start began
        self.end_sentence = ""

    def supervise(self) -> int:
        """Supervise the run from its claim to its last event; return the exit code (see the module)."""
        if (refusal_code := self._claim_run()) is not None:
            return refusal_code
        self._record_start()
        self.saved_step = retry_budget.find_saved_step(self.run_dir)
        try:
            variables = self._prepare_start()
        except ShardlabError as error:
            is_node_lost = isinstance(error, step.NodeLost)
            if isinstance(error, step.NodeLost):
                self._record_event(step.NODE_LOST_EVENT, node=error.node, why=str(error))
            retry_state = self._record_end(code=1, reason="node_fail" if is_node_lost else "failed", why=str(error))
            self._requeue_in_slurm(None if isinstance(error, retry_budget.RestartedTooOften) else retry_state)
            raise
        if self.run.track is not None:
            self.tracker = node_processes.TrackerProcess(self.run_dir, self.run.track)
        code, reason = self._supervise_command(variables)
        if reason is None and code != 0:
            reason = self._find_failure_reason()
            self.end_sentence = self.end_sentence or find_failure_cause(self.run_dir.path, self.run_dir.job_log)
        if reason == "superseded":
            if self.tracker is not None:
                self.tracker.end(wait_s=0)
            return CLAIMED_CODE
        retry_state = self._record_end(code=code, reason=reason, why=self.end_sentence, steps=self._count_steps(code, reason))
        if self.tracker is not None:
            self.tracker.end()
        self._requeue_in_slurm(retry_state)
        return {"timeout": OUT_OF_TIME_CODE, "hung": OUT_OF_TIME_CODE, "cancelled": TOLD_TO_END_CODE}.get(reason or "", code)

    def _record_end(self, **end_data: Any) -> str | None:
        """Record the end of the run. Returns the state after which the run is started again; None if the run is not started
        again.

        end_data: the data of the event. Without Slurm, the next attempt is in the queue before the end is recorded
        (jobs.supervisor.retries)."""
        may_start_again = end_data["reason"] == "preempted" or not self._must_end()
        state = retry_budget.find_retry_state(self.run_dir, self.run, end_data, self.saved_step) if may_start_again else None
        if state is not None and self.run.scheduler != "slurm" and (why := retries.queue_next(self.run_dir, self.run, state)):
            print(f"{self.run_dir.run_id}: no further attempt is queued: {why}", file=sys.stderr)
        self._record_event("exited", **end_data)
        return state

    def _requeue_in_slurm(self, retry_state: str | None) -> None:
        """Ask Slurm to start the run again, unless somebody has told the run to end. retry_state: from `_record_end`."""
        if retry_state is None or self.run.scheduler != "slurm":
            return
        self._wait_for_slurm()
        may_start_again = retry_state == "preempted" or not self._must_end()
        if may_start_again and (why := retries.requeue_job(self.run_dir, self.run, retry_state)):
            print(f"{self.run_dir.run_id}: Slurm does not start the run again: {why}", file=sys.stderr)

    def _must_end(self) -> bool:
        """Whether somebody told this start of the run to end."""
        return self.is_told_to_end or self._is_cancelled()

    def _claim_run(self) -> int | None:
        """Claim the run for this start. Returns None if this start may run it, otherwise the exit code."""
        if not self.run_dir.claim.exists() and (why := self._explain_refused_start()):
            print(f"{self.run_dir.run_id}: {why}.", file=sys.stderr)
            return PACKAGES_CHANGED_CODE
        claim_kind = (
            "first"
            if next_try.is_claimed(self.run_dir)
            else None
            if self._ran_out_of_memory()
            else claim.claim_run(self.run_dir)
        )
        if claim_kind is None:
            print(f"{self.run_dir.run_id}: claimed already; this start does nothing.", file=sys.stderr)
            return CLAIMED_CODE
        if claim_kind == "again":
            time.sleep(OVERLAP_S)
            claim.move_earlier_records(self.run_dir)
        return None

    def _ran_out_of_memory(self) -> bool:
        """Whether the run is a try of a search that already ended out of memory: such a try is not repeated if its job is
        restarted, because the search continues with the next try."""
        return self.run.search is not None and self.run_dir.claim.exists() and self.run_dir.judge().state == "oom"

    def _explain_refused_start(self) -> str:
        """Why the run must not start now; '' if it may start.

        If the run must not start, this method first writes an event, after which the run is held or its state is `planned`.
        """
        why = self._find_source_fault()
        if not why and (changed_packages := self._describe_changed_packages()):
            why = hold.HELD_WHY.format(changed=changed_packages)
            if self.run_dir.judge().state == "pending" and not hold.hold_alike_runs(self.run_dir, self.run, why):
                return why
            why = f"{changed_packages}; {RESUBMIT_HINT}"
        if why:
            self._record_event("refused", why=why, **claim.make_token_event_data())
        return why

    def _record_start(self) -> None:
        signal.signal(signal.SIGTERM, self._note_signal)
        if self.is_in_slurm:  # SIGUSR1 (`--signal=B:USR1@60`) asks for a checkpoint, which ranks save once they have started
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        event_data: dict[str, Any] = (
            {"job": claim.read_own_job_id(), "restarts": claim.count_job_restarts()} if self.is_in_slurm else {}
        )
        if self.run.scheduler == "allocation" and (cluster := read_own_cluster()) is not None:
            event_data["cluster"] = cluster  # a submitted run has it in the event `submitted`
        event_data |= {next_try.SEARCH_KEY: True} if self.run.search is not None else {}
        self._record_event("started", **host.identify_this_process(), **event_data)

    def _supervise_command(self, variables: dict[str, str]) -> tuple[int, str | None]:
        """Run the command with telemetry, then end all processes that the command left behind.

        Returns (exit code, the reason for which this process ended the command; None if the command ended by itself).
        """
        self.sampler = node_processes.SamplerProcess(self.run_dir) if self.starts_ranks_here else None
        oom_watch = node_processes.OomWatch()
        end_reason: str | None
        try:
            exit_code, end_reason = self._run_command(variables)
        except node_processes.CannotStart as error:
            exit_code, end_reason = NOT_FOUND_CODE, None
            self._record_event("failed", why=str(error))
            files.append(self.run_dir.job_log, f"{error}\n".encode())
        if self.sampler is not None:
            self.sampler.end()
        node_processes.kill_marked_processes(str(self.run_dir.path))
        if self.starts_ranks_here:
            node_processes.remove_data_copies(self.run_dir)
        is_finished_command = exit_code == 0 and end_reason is None and self.run.cell.command is not None
        if is_finished_command and (why := command_run.write_result(self.run_dir, self.run)):
            self._record_event("failed", why=why)
            exit_code = 1
        if self.starts_ranks_here and exit_code != 0 and end_reason is None:
            oom_watch.record_oom(self.run_dir)
        return exit_code, end_reason

    def _find_failure_reason(self) -> str | None:
        """The reason why the command failed, if a person, Slurm or a lost node caused the failure; otherwise None.

        Also sets `self.end_sentence` to a sentence for people.
        """
        if self._is_cancelled():
            self.end_sentence = CANCELLED_WHY
            return "cancelled"
        if self.is_in_slurm and (self.is_told_to_end or self._has_slurm_ended_ranks()):
            self.end_sentence = TOLD_TO_END_WHY
            return TOLD_REASON
        if lost_event := next((event for event in self.run_dir.read_events() if event.event == step.NODE_LOST_EVENT), None):
            self.end_sentence = str(lost_event.data.get("why", ""))
            return "node_fail"
        if self.is_in_slurm and query.is_preempted(claim.read_own_job_id()):
            self.end_sentence = states.CLAUSE_BY_END_STATE["PREEMPTED"]
            return "preempted"
        return None

    def _has_slurm_ended_ranks(self) -> bool:
        """Whether Slurm told the ranks to end, but this process not (yet). Ranks that save a checkpoint record the signal.
        When an allocation ends, `salloc` sends no signal to its command, to which this process belongs."""
        is_rank_told = any(
            event.event == "timeout" and event.data.get("signal") == "SIGTERM" and event.wall_s > self.start_wall_s
            for event in self.run_dir.read_events()
        )
        return is_rank_told or (self.run.scheduler == "allocation" and allocation.has_ended(claim.read_own_job_id()))

    def _prepare_start(self) -> dict[str, str]:
        """Do what must be done before the ranks start; return additional variables for the environment of the ranks.

        Checks the source and the packages, waits for Slurm and for free GPUs, sends files to nodes that share no folder, and
        chooses the rendezvous. Raises ShardlabError if the run must not start.
        """
        if why := self._find_source_fault() or self._describe_changed_packages():
            raise ShardlabError(f"{why}.")
        retry_budget.must_be_within_budget(self.run_dir, self.run)
        self._wait_for_slurm()
        if self.starts_ranks_here:  # otherwise a task on each node waits for its GPUs (jobs/supervisor/step_task.py)
            wait_for_gpus.wait_until_gpus_free(self.run_dir, self.run, os.environ, self._must_end)
        if self.run.separate_folders:
            nodes = step.read_chosen_nodes(self.run_dir, self.run)
            # the time limit begins to count here, because the run uses its nodes from now on
            deadline = self._start_time_limit()
            node_folders.send_run_files(self.run_dir, self.run, nodes, lambda: self._must_end() or time.monotonic() > deadline)
        # Without Slurm, this machine may not be a node of the run, so jobs.ssh.step chooses the rendezvous instead.
        rendezvous_variables = rendezvous.choose_rendezvous(self.run.world.nnodes) if self.run.scheduler != "ssh" else {}
        return rendezvous_variables | find_launcher(self.run.launcher).prepare(self.run_dir, self.run)

    def _start_time_limit(self) -> float:
        """The end of the time limit, by the monotonic clock; infinite without a limit. The limit begins to count at the first
        call."""
        if self.deadline_s is None:
            self.deadline_s = time.monotonic() + self.limit_s if self.limit_s else float("inf")
        return self.deadline_s

    def _find_source_fault(self) -> str:
        """A clause that says why the source of this process is not the source with which the run was submitted; '' if it is."""
        if self.run.environment is not None:
            return OLD_WHY
        submitted_source, current_digest = self.run.source, source_digest.digest_source()
        if submitted_source is None or Path(submitted_source).name == current_digest:
            return ""
        return DAMAGED_WHY.format(root=source_digest.ROOT, now=current_digest, then=submitted_source)

    def _describe_changed_packages(self) -> str:
        """A clause that says that the installed packages changed since the run was submitted; '' if they did not change."""
        submitted_digest, current_digest = self.run.packages, source_digest.digest_installed_packages()
        if submitted_digest in (None, current_digest):
            return ""
        return hold.PACKAGES_CHANGED.format(then=submitted_digest, now=current_digest)

    def _wait_for_slurm(self) -> None:
        """Wait until Slurm's controller answers.

        Without the controller, no job step can start and no job can be requeued: this run would fail, and so would each later
        run in the same allocation. If the run is told to end, the wait ends too, and the caller handles the request.
        """
        is_announced = False
        while self.is_in_slurm and is_controller_down() and not (self._must_end() or claim.is_taken_over(self.run_dir)):
            if not is_announced:
                print(f"{self.run_dir.run_id}: Slurm's controller does not answer; waiting for it.", file=sys.stderr)
            is_announced = True
            time.sleep(SLURM_CHECK_INTERVAL_S)

    def _record_event(self, event_kind: str, **data: Any) -> None:
        self.run_dir.write_event("attempt", event_kind, **data)

    def _note_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_told_to_end = True

    def _run_command(self, variables: dict[str, str]) -> tuple[int, str | None]:
        """Start the command and wait until it ends, or end it at its time limit, after a hang or on request.

        Returns (exit code, the reason for which this process ended the command, or None). If signal N ended the command, the
        exit code is 128 + N, as in a shell.
        """
        deadline_s = self._start_time_limit()
        with files.open_append(self.run_dir.job_log) as log_file:
            environment = {
                **os.environ,
                **self.run.cell.env,
                **variables,
                node_processes.RUN_MARK_VARIABLE: str(self.run_dir.path),
                **_make_last_checkpoint_variable(self.limit_s, deadline_s),
            }
            process = node_processes.start_process(container.replace_node_disk(self.command), log_file.fileno(), environment)
        if self.is_in_slurm:
            signal.signal(signal.SIGUSR1, lambda number, _frame: process.send_signal(number))
        hang_watch, reason = HangWatch(self.run_dir, self.run.cell.hang_limit_s), None
        with suspension.SuspensionWatch() as suspension_watch:  # starts a thread: must come after the start (fork) of the ranks
            while (exit_code := process.poll()) is None:
                if suspended_s := suspension_watch.take_suspended_s():
                    deadline_s += suspended_s  # Slurm too extends the limit of a job by the time of its suspension
                    self._record_event(suspension.SUSPENDED_EVENT, seconds=round(suspended_s, 3))
                if self.sampler is not None:
                    self.sampler.restart_if_dead()
                if self.tracker is not None:
                    self.tracker.record_if_failed()
                if (reason := self._find_end_reason(deadline_s, hang_watch)) is not None:
                    # computed before the ranks are ended, because ending ranks may still write records
                    self.end_sentence = self._describe_reason(reason, hang_watch)
                    grace_s = step.MOST_END_S if self.run.scheduler == "ssh" else node_processes.GRACE_S
                    exit_code = node_processes.end_process(process, signal.SIGTERM, grace_s)
                    break
                time.sleep(0.05)
        return (128 - exit_code if exit_code < 0 else exit_code), reason

    def _find_end_reason(self, deadline_s: float, hang_watch: HangWatch) -> str | None:
        if time.monotonic() > self.next_look_s:
            self.next_look_s = time.monotonic() + LOOK_INTERVAL_S
            if claim.is_taken_over(self.run_dir):
                return "superseded"
            if self._is_cancelled():
                return "cancelled"
        if self.is_told_to_end:
            return "cancelled" if not self.is_in_slurm or self._is_cancelled() else TOLD_REASON
        if time.monotonic() > deadline_s and not (self.run_dir.result.exists() and self._waits_for_controller()):
            return "timeout"
        return "hung" if hang_watch.has_hung() and not self._waits_for_controller() else None

    def _waits_for_controller(self) -> bool:
        """Whether Slurm's controller does not answer. During such an outage, the ranks may have ended already, although their
        job step still waits for the controller (jobs.slurm.commands)."""
        return self.is_in_slurm and self.outage_watch.was_recently_down()

    def _is_cancelled(self) -> bool:
        """Whether a person cancelled the run since this start, from any machine."""
        return any(
            event.event == "cancel_requested" and event.wall_s > self.start_wall_s for event in self.run_dir.read_events()
        )

    def _count_steps(self, exit_code: int, end_reason: str | None) -> int | None:
        """The number of timed steps that all ranks recorded; None if the run did not complete or its records cannot be read.

        Counted once here, so that no reader has to count the steps again.
        """
        if exit_code != 0 or end_reason is not None:
            return None
        with contextlib.suppress(WorkspaceError):
            return self.run_dir.count_timed_steps(self.run.cell.recording_ranks, self.run.cell.instruments.lost_worker)
        return None

    def _describe_reason(self, reason: str, hang_watch: HangWatch) -> str:
        if reason == "hung":
            return hang_watch.explain_hang()
        texts_by_reason = {
            "timeout": f"ended at its time limit of {self.limit_s} s",
            "cancelled": CANCELLED_WHY,
            TOLD_REASON: TOLD_TO_END_WHY,
        }
        return texts_by_reason.get(reason, "")


def _make_last_checkpoint_variable(limit_s: int | None, deadline_s: float) -> dict[str, str]:
    """The variable that tells ranks at which time (seconds since the epoch) they save a checkpoint and end; empty without a
    time limit.

    Ranks get a time instead of a signal, because not every launcher forwards signals to its ranks. limit_s: the time limit in
    seconds. deadline_s: the end of the time limit, by the monotonic clock.
    """
    if not limit_s:
        return {}
    left_s = deadline_s - time.monotonic()
    return {SAVE_AT: f"{time.time() + left_s - min(LAST_SAVE_S, LAST_SAVE_SHARE * limit_s):.3f}"}


def main(argv: list[str]) -> int:
    """Supervise the run of the command line; return the exit code. argv: RUN_DIR -- COMMAND... Raises ShardlabError."""
    if len(argv) < 3 or argv[1] != "--":
        raise InputError("usage: python -m jobs.supervisor.attempt RUN_DIR -- COMMAND...")
    run_dir = RunDir(Path(argv[0]).absolute())
    run_dir.log.mkdir(exist_ok=True)
    supervisor = AttemptSupervisor(run_dir, argv[2:])
    # Without Slurm, the scheduler says on which nodes the run is, and not the shell in which `jobs submit` was called.
    if not supervisor.is_in_slurm:
        remove_job_variables()
    exit_code = supervisor.supervise()
    if supervisor.run.search is not None:
        next_try.replace_process(run_dir, exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(console.run_command(lambda: main(sys.argv[1:])))
