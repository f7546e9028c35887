"""Supervise one run on the machine where it runs: claim it, start telemetry and ranks, and write down how it ended.

    python -m jobs.attempt RUN_DIR -- COMMAND...

In a Slurm job COMMAND is a job step over all nodes, and telemetry is started there (jobs.step_task). On nodes without Slurm,
jobs.ssh.step takes the place of the job step.
Exit codes: the command's own; 75 if the run is claimed already; 76 if the installed packages changed since the run was sent,
after which the run is held (jobs.hold), or if its copy of our source is damaged, after which it is `planned` again; 124 at the
time limit and after a hang; 127 if the command is not installed; 143 if the run was told to end.
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

import psutil

from jobs import claim, hold, node_processes, rendezvous, wait_for_gpus
from jobs.hang_detection import HangWatch
from jobs.launcher import launcher
from jobs.slurm import query, states
from jobs.slurm.commands import call, is_down
from jobs.slurm.outage import OutageWatch
from jobs.ssh import node_folders, step
from shardlab import checkpoint, console, container, host, source_digest, suspension
from shardlab.errors import InputError, ShardlabError, WorkspaceError
from shardlab.run import SAVE_AT
from shardlab.rundir import RunDir

CLAIMED, OUT_OF_TIME, NOT_FOUND, TOLD = 75, 124, 127, 143
CHANGED = 76
AGAIN_WITH = "`jobs submit` or `jobs retry` submits it with the packages and the source that are installed now"
DAMAGED_WHY = (
    "shardlab's source in {root} (digest {now}) is not the copy {then} that the run was submitted with: the copy was changed, "
    f"or the script does not use it; {AGAIN_WITH}"
)
OLD_WHY = f"the run was rendered by an earlier version of shardlab, which kept no copy of its source; {AGAIN_WITH}"
# Ranks that keep checkpoints save so many seconds before the time limit; of a short limit, this share before its end.
SAVE_S, SAVE_SHARE = 60.0, 0.2
CANCELLED = "cancelled while it ran"
# At its time limit, for a preemption, after a node's failure and for a person, Slurm signals the batch step in the same way.
# Only Slurm can say which it was; until then, the run counts as failed.
TOLD_WHY = "Slurm told the run to end (SIGTERM)"
AGAIN = {  # the ends after which Slurm is asked to start a run again, and why
    "timeout": "it reached its time limit, and left a checkpoint to resume from",
    "preempted": "Slurm preempted it in favour of another job",
}
SLURM_S = 5.0  # seconds between two checks whether the controller answers again
LOOK_S = 1.0  # seconds between two checks of the run's folder for what others wrote there
OVERLAP_S = 3 * LOOK_S  # a start after a requeue waits so long, until an earlier start on a lost node has noticed it


class Attempt:
    """One run from its claim to its last event."""

    def __init__(self, folder: RunDir, command: list[str]) -> None:
        self.folder = folder
        self.command = command
        self.run = folder.read_run()
        self.in_slurm = self.run.scheduler in ("slurm", "allocation")
        self.ranks_here = self.run.scheduler == "local"  # else a step starts them on each node
        self.sampler: node_processes.Sampler | None = None  # while the ranks are here
        self.tracker: node_processes.Tracker | None = None
        self.told = False  # whether SIGTERM told this process to end
        self.begun = time.time()  # earlier requests to cancel do not apply to this start
        self.limit_s = self.run.limit_s or self.run.cell.time_limit_s
        self.deadline: float | None = None  # when the limit is over; None until it begins to count
        self.look = 0.0  # when to check the run's folder again
        self.outage = OutageWatch()
        self.why = ""

    def main(self) -> int:
        """Run it from its claim to its last event; return the exit code."""
        if (refused := self._take()) is not None:
            return refused
        self._note_start()
        try:
            extra = self._prepared()
        except ShardlabError as error:
            lost = isinstance(error, step.Lost)
            if isinstance(error, step.Lost):
                self._event(step.LOST, node=error.node, why=str(error))
            self._event("exited", code=1, reason="node_fail" if lost else "failed", why=str(error))
            raise
        saved = _saved_step(self.folder)
        if self.run.track is not None:
            self.tracker = node_processes.Tracker(self.folder, self.run.track)
        code, reason = self._supervised(extra)
        if reason is None and code != 0:
            reason = self._reason_of_failure()
        if reason == "superseded":
            if self.tracker is not None:
                self.tracker.end(wait_s=0)
            return CLAIMED
        self._event("exited", code=code, reason=reason, why=self.why, steps=self._counted(code, reason))
        if self.tracker is not None:
            self.tracker.end()
        if self._goes_on(saved):
            self._wait_for_slurm()
            self._event("requeued", why=AGAIN[self.folder.judge().state])
            call(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
        return {"timeout": OUT_OF_TIME, "hung": OUT_OF_TIME, "cancelled": TOLD}.get(reason or "", code)

    def _take(self) -> int | None:
        """Claim the run. Returns the exit code if this start must not run it."""
        if not self.folder.claim.exists() and (why := self._given_back()):
            print(f"{self.folder.run_id}: {why}.", file=sys.stderr)
            return CHANGED
        taken = claim.take(self.folder)
        if taken is None:
            print(f"{self.folder.run_id}: claimed already; this start does nothing.", file=sys.stderr)
            return CLAIMED
        if taken == "again":
            time.sleep(OVERLAP_S)
            claim.set_aside(self.folder)
        return None

    def _given_back(self) -> str:
        """Why the run must not start now, after it was held or is `planned` again; '' if it may start."""
        why = self._source_fault()
        if not why and (changed := self._packages_changed()):
            why = hold.WHY.format(changed=changed)
            if self.folder.judge().state == "pending" and not hold.hold(self.folder, self.run, why):
                return why
            why = f"{changed}; {AGAIN_WITH}"
        if why:
            self._event("refused", why=why, **claim.token())
        return why

    def _note_start(self) -> None:
        signal.signal(signal.SIGTERM, self._take_note)
        me = psutil.Process()
        place = {"job": claim.job(), "restarts": claim.restarts()} if self.in_slurm else {}
        self._event("started", pid=me.pid, created=me.create_time(), boot_id=host.boot_id(), **place)

    def _supervised(self, extra: dict[str, str]) -> tuple[int, str | None]:
        """Run the command with telemetry, then end all processes that it left; (exit code, why we ended it or None)."""
        self.sampler = node_processes.Sampler(self.folder) if self.ranks_here else None
        kills_before = node_processes.oom_kills()
        reason: str | None
        try:
            code, reason = self._run_command(extra)
        except node_processes.CannotStart as error:
            code, reason = NOT_FOUND, None
            self._event("failed", why=str(error))
            with self.folder.job_log.open("a") as log:
                log.write(f"{error}\n")
        if self.sampler is not None:
            self.sampler.end()
        node_processes.end_strays(str(self.folder.path))
        if self.ranks_here:
            node_processes.remove_data_copies(self.folder)
        if self.ranks_here and code != 0 and reason is None and node_processes.oom_kills() > kills_before:
            self._event("oom", why="out of host memory: the kernel's OOM killer ended a process during the run")
        return code, reason

    def _reason_of_failure(self) -> str | None:
        """Why the command failed by itself, if somebody else caused it; sets `why` as well."""
        if self._asked_to_end():
            self.why = CANCELLED
            return "cancelled"
        if self.in_slurm and self.told:  # the ranks received the signal too, and ended before this process ended them
            self.why = TOLD_WHY
            return "told"
        if lost := next((event for event in self.folder.events() if event.event == step.LOST), None):
            self.why = str(lost.data.get("why", ""))
            return "node_fail"
        if self.in_slurm and query.is_preempted(claim.job()):
            self.why = states.WHY["PREEMPTED"]
            return "preempted"
        return None

    def _prepared(self) -> dict[str, str]:
        """Additional variables for the ranks' environment. Raises ShardlabError if the run must not start."""
        if why := self._source_fault() or self._packages_changed():
            raise ShardlabError(f"{why}.")
        if self._restarts() > self.run.requeues:
            raise ShardlabError(f"Slurm has restarted the run {self._restarts()} times; allowed: {self.run.requeues}.")
        self._wait_for_slurm()
        if self.ranks_here:  # else one task on each node waits (jobs/step_task.py)
            wait_for_gpus.wait(self.folder, self.run, os.environ, lambda: self.told or self._asked_to_end())
        if self.run.separate_folders:
            nodes = step.chosen(self.folder, self.run)
            deadline = self._limited()  # the run uses its nodes from here on
            node_folders.send(
                self.folder, self.run, nodes, lambda: self.told or self._asked_to_end() or time.monotonic() > deadline
            )
        # Without Slurm, this machine may not be a node of the run: jobs.ssh.step calls the nodes together.
        place = rendezvous.call_together(self.run.world.nnodes) if self.run.scheduler != "ssh" else {}
        return place | launcher(self.run.launcher).prepare(self.folder, self.run)

    def _limited(self) -> float:
        """When the time limit is over, by the monotonic clock. It begins to count at the first call."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.limit_s if self.limit_s else float("inf")
        return self.deadline

    def _source_fault(self) -> str:
        """A clause if this process does not run from the source that the run was submitted with; '' if it does."""
        if self.run.environment is not None:
            return OLD_WHY
        then, now = self.run.source, source_digest.source()
        if then is None or Path(then).name == now:
            return ""
        return DAMAGED_WHY.format(root=source_digest.ROOT, now=now, then=then)

    def _packages_changed(self) -> str:
        """A clause if the installed packages changed since the run was submitted; '' if they did not."""
        then, now = self.run.packages, source_digest.packages()
        return hold.CHANGED.format(then=then, now=now) if then not in (None, now) else ""

    def _restarts(self) -> int:
        """How often Slurm has started the job again, not counting restarts because the run was held."""
        return claim.restarts() - hold.requeues(self.folder)

    def _wait_for_slurm(self) -> None:
        """Wait until Slurm's controller answers. Without it no step starts and no job is requeued: this run would fail, and so
        would each later run of the same allocation. A request to end the run ends the wait too, and is handled after it."""
        said = False
        while self.in_slurm and is_down() and not (self.told or self._asked_to_end() or claim.lost(self.folder)):
            if not said:
                print(f"{self.folder.run_id}: Slurm's controller does not answer; waiting for it.", file=sys.stderr)
            said = True
            time.sleep(SLURM_S)

    def _event(self, event: str, **data: Any) -> None:
        self.folder.write_event("attempt", event, **data)

    def _take_note(self, _number: int, _frame: FrameType | None) -> None:
        self.told = True

    def _run_command(self, extra: dict[str, str]) -> tuple[int, str | None]:
        """(exit code, why we ended it or None); a signal's number comes as 128 + number, as in a shell."""
        deadline = self._limited()
        with self.folder.job_log.open("ab") as log:
            environment = {
                **os.environ,
                **extra,
                node_processes.MARK: str(self.folder.path),
                **_save_at(self.limit_s, deadline),
            }
            ranks = node_processes.start(container.with_node_disk(self.command), log.fileno(), environment)
        progress, reason = HangWatch(self.folder, self.run.cell.hang_limit_s), None
        with suspension.SuspensionWatch() as suspended:  # a thread, and so after the start of the ranks
            while (code := ranks.poll()) is None:
                if suspended_s := suspended.take_s():
                    deadline += suspended_s  # as Slurm does with the limit of a job that was suspended
                    self._event(suspension.EVENT, seconds=round(suspended_s, 3))
                if self.sampler is not None:
                    self.sampler.look()
                if self.tracker is not None:
                    self.tracker.look()
                if (reason := self._reason_to_end(deadline, progress)) is not None:
                    self.why = self._why(reason, progress)  # before the end of the ranks, which may write more
                    grace_s = step.END_S if self.run.scheduler == "ssh" else node_processes.GRACE_S
                    code = node_processes.end(ranks, signal.SIGTERM, grace_s)
                    break
                time.sleep(0.05)
        return (128 - code if code < 0 else code), reason

    def _reason_to_end(self, deadline: float, progress: HangWatch) -> str | None:
        if time.monotonic() > self.look:
            self.look = time.monotonic() + LOOK_S
            if claim.lost(self.folder):
                return "superseded"
            if self._asked_to_end():
                return "cancelled"
        if self.told:
            return "cancelled" if not self.in_slurm or self._asked_to_end() else "told"
        if time.monotonic() > deadline and not (self.folder.result.exists() and self._waits_for_controller()):
            return "timeout"
        return "hung" if progress.is_over() and not self._waits_for_controller() else None

    def _waits_for_controller(self) -> bool:
        """Whether the job step may have no more to do than to wait until Slurm's controller is back."""
        return self.in_slurm and self.outage.is_away()

    def _asked_to_end(self) -> bool:
        """Whether a person cancelled the run since this start, from any machine."""
        return any(event.event == "cancel_requested" and event.wall_s > self.begun for event in self.folder.events())

    def _goes_on(self, saved: int) -> bool:
        """Whether Slurm should start the run again: it was preempted, or it reached its time limit and saved a later checkpoint
        than the one that it started from."""
        ended = self.folder.judge().state
        return (
            self.in_slurm
            and ended in AGAIN
            and ended not in self.run.cell.expect
            and self._restarts() < self.run.requeues
            and (ended == "preempted" or _saved_step(self.folder) > saved)
        )

    def _counted(self, code: int, reason: str | None) -> int | None:
        """The number of steps that all ranks recorded, counted here once, so that no reader has to count them again."""
        if code != 0 or reason is not None:
            return None
        with contextlib.suppress(WorkspaceError):
            return self.folder.timed_steps(self.run.cell.gpus)
        return None

    def _why(self, reason: str, progress: HangWatch) -> str:
        if reason == "hung":
            return progress.why()
        said = {"timeout": f"ended at its time limit of {self.limit_s} s", "cancelled": CANCELLED, "told": TOLD_WHY}
        return said.get(reason, "")


def _saved_step(folder: RunDir) -> int:
    """The step of its newest checkpoint, 0 without one."""
    return max((checkpoint.step_of(path) for path in checkpoint.whole(folder.path)), default=0)


def _save_at(limit_s: int | None, deadline: float) -> dict[str, str]:
    """A variable with the time at which ranks save and end by themselves. It is a time and no signal, because not every
    launcher forwards signals to its ranks. deadline: when the limit is over, by the monotonic clock."""
    if not limit_s:
        return {}
    left_s = deadline - time.monotonic()
    return {SAVE_AT: f"{time.time() + left_s - min(SAVE_S, SAVE_SHARE * limit_s):.3f}"}


def main(argv: list[str]) -> int:
    """Supervise the run of the command line; return the exit code. argv: RUN_DIR -- COMMAND... Raises ShardlabError."""
    if len(argv) < 3 or argv[1] != "--":
        raise InputError("usage: python -m jobs.attempt RUN_DIR -- COMMAND...")
    folder = RunDir(Path(argv[0]).absolute())
    folder.log.mkdir(exist_ok=True)
    return Attempt(folder, argv[2:]).main()


if __name__ == "__main__":
    sys.exit(console.run(lambda: main(sys.argv[1:])))
