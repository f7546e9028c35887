"""Supervise one run on the machine where it runs: claim it, start telemetry and ranks, and write down how it ended.

    python -m jobs.attempt RUN_DIR -- COMMAND...

In a Slurm job COMMAND is a job step over all nodes, and telemetry is started there (jobs.node).
Exit codes: the command's own; 75 if the run is claimed already; 76 if the packages or our source changed since the run was
sent, after which the run is `planned` again; 124 at the time limit and after a hang; 127 if the command is not installed;
143 if the run was told to end.
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

from jobs import claim, gpu_users, meeting, on_node
from jobs.launcher import launcher
from jobs.progress import Progress
from jobs.slurm import query, states
from jobs.slurm.commands import call, is_down
from jobs.standstill import Standstill
from shardlab import checkpoint, code, console, host, pauses
from shardlab.errors import InputError, ShardlabError, WorkspaceError
from shardlab.run import SAVE_AT
from shardlab.rundir import RunDir

CLAIMED, OUT_OF_TIME, NOT_FOUND, TOLD = 75, 124, 127, 143
CHANGED = 76  # the queue holds the other runs of the same environment
CHANGED_WHY = (
    "the packages or shardlab's source changed since the run was submitted ({then}, now {now}); `jobs submit` or `jobs retry` "
    "submits it with the packages and the source that are installed now"
)
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
        self.in_slurm = self.run.scheduler == "slurm"
        self.told = False  # to end, by SIGTERM
        self.begun = time.time()  # earlier requests to cancel do not apply to this start
        self.look = 0.0  # when to check the run's folder again
        self.why = ""
        self.changed = ""  # why the packages or our source are not those that the run was sent with

    def main(self) -> int:
        self.changed = self._changed()
        if self.changed and not self.folder.claim.exists():
            self._event("refused", why=self.changed, **claim.token())
            print(f"{self.folder.run_id}: {self.changed}.", file=sys.stderr)
            return CHANGED
        taken = claim.take(self.folder)
        if taken is None:
            print(f"{self.folder.run_id}: claimed already; this start does nothing.", file=sys.stderr)
            return CLAIMED
        if taken == "again":
            time.sleep(OVERLAP_S)
            claim.set_aside(self.folder)
        signal.signal(signal.SIGTERM, self._take_note)
        me = psutil.Process()
        place = {"job": claim.job(), "restarts": claim.restarts()} if self.in_slurm else {}
        self._event("started", pid=me.pid, created=me.create_time(), boot_id=host.boot_id(), **place)
        try:
            extra = self._prepared()
        except ShardlabError as error:
            self._event("exited", code=1, reason="failed", why=str(error))
            raise
        saved = _saved_step(self.folder)
        sampler = on_node.start_sampler(self.folder) if not self.in_slurm else None
        kills_before = on_node.oom_kills()
        try:
            code, reason = self._run_command(extra)
        except on_node.CannotStart as error:
            code, reason = NOT_FOUND, None
            self._event("failed", why=str(error))
            with self.folder.job_log.open("a") as log:
                log.write(f"{error}\n")
        if sampler is not None:
            on_node.end(sampler, signal.SIGTERM, 2.0)
        on_node.end_strays(str(self.folder.path))
        if not self.in_slurm and code != 0 and reason is None and on_node.oom_kills() > kills_before:
            self._event("oom", why="out of host memory: the kernel's OOM killer ended a process during the run")
        if reason is None and code != 0 and self._asked_to_end():
            reason, self.why = "cancelled", CANCELLED
        elif reason is None and code != 0 and self.in_slurm and self.told:  # its ranks were faster
            reason, self.why = "told", TOLD_WHY
        elif reason is None and code != 0 and self.in_slurm and query.is_preempted(claim.job()):
            reason, self.why = "preempted", states.WHY["PREEMPTED"]
        if reason == "superseded":
            return CLAIMED
        self._event("exited", code=code, reason=reason, why=self.why, steps=self._counted(code, reason))
        if self._goes_on(saved):
            self._wait_for_slurm()
            self._event("requeued", why=AGAIN[self.folder.judge().state])
            call(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
        return {"timeout": OUT_OF_TIME, "hung": OUT_OF_TIME, "cancelled": TOLD}.get(reason or "", code)

    def _prepared(self) -> dict[str, str]:
        """Additional variables for the ranks' environment. Raises ShardlabError if the run must not start."""
        if self.changed:
            raise ShardlabError(f"{self.changed}.")
        if claim.restarts() > self.run.requeues:
            raise ShardlabError(f"Slurm has restarted the run {claim.restarts()} times; allowed: {self.run.requeues}.")
        self._wait_for_slurm()
        if not self.in_slurm:  # in Slurm, one task on each node waits (jobs/node.py)
            gpu_users.wait(self.folder, self.run, os.environ, lambda: self.told or self._asked_to_end())
        place = meeting.call_together(self.run.world.nnodes)
        return place | launcher(self.run.launcher).prepare(self.folder, self.run)

    def _changed(self) -> str:
        """A clause if the packages or our source changed since the run was submitted; '' if they did not."""
        then, now = self.run.environment, code.digest()
        return CHANGED_WHY.format(then=then, now=now) if then not in (None, now) else ""

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
        limit = self.run.limit_s or self.run.cell.time_limit_s
        deadline = time.monotonic() + limit if limit else float("inf")
        with self.folder.job_log.open("ab") as log:
            environment = {**os.environ, **extra, on_node.MARK: str(self.folder.path), **_save_at(limit)}
            ranks = on_node.start(self.command, log.fileno(), environment)
        progress, reason = Progress(self.folder, self.run.cell.hang_limit_s), None
        with Standstill() as standstill:  # a thread, and so after the start of the ranks
            while (code := ranks.poll()) is None:
                if still_s := standstill.take_s():
                    deadline += still_s  # as Slurm does with the limit of a job that was suspended
                    self._event(pauses.EVENT, seconds=round(still_s, 3))
                if (reason := self._reason_to_end(deadline, progress)) is not None:
                    self.why = self._why(reason, limit, progress)  # before the end of the ranks, which may write more
                    code = on_node.end(ranks, signal.SIGTERM, on_node.GRACE_S)
                    break
                time.sleep(0.05)
        return (128 - code if code < 0 else code), reason

    def _reason_to_end(self, deadline: float, progress: Progress) -> str | None:
        if time.monotonic() > self.look:
            self.look = time.monotonic() + LOOK_S
            if claim.lost(self.folder):
                return "superseded"
            if self._asked_to_end():
                return "cancelled"
        if self.told:
            return "cancelled" if not self.in_slurm or self._asked_to_end() else "told"
        if time.monotonic() > deadline:
            return "timeout"
        return "hung" if progress.is_over() else None

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
            and claim.restarts() < self.run.requeues
            and (ended == "preempted" or _saved_step(self.folder) > saved)
        )

    def _counted(self, code: int, reason: str | None) -> int | None:
        """The number of steps that all ranks recorded, counted here once, so that no reader has to count them again."""
        if code != 0 or reason is not None:
            return None
        with contextlib.suppress(WorkspaceError):
            return self.folder.timed_steps(self.run.cell.gpus)
        return None

    def _why(self, reason: str, limit: int | None, progress: Progress) -> str:
        if reason == "hung":
            return progress.why()
        said = {"timeout": f"ended at its time limit of {limit} s", "cancelled": CANCELLED, "told": TOLD_WHY}
        return said.get(reason, "")


def _saved_step(folder: RunDir) -> int:
    """The step of its newest checkpoint, 0 without one."""
    return max((checkpoint.step_of(path) for path in checkpoint.whole(folder.path)), default=0)


def _save_at(limit_s: int | None) -> dict[str, str]:
    """A variable with the time at which ranks save and end by themselves. It is a time and no signal, because not every
    launcher forwards signals to its ranks."""
    return {SAVE_AT: f"{time.time() + limit_s - min(SAVE_S, SAVE_SHARE * limit_s):.3f}"} if limit_s else {}


def main(argv: list[str]) -> int:
    if len(argv) < 3 or argv[1] != "--":
        raise InputError("usage: python -m jobs.attempt RUN_DIR -- COMMAND...")
    folder = RunDir(Path(argv[0]).absolute())
    folder.log.mkdir(exist_ok=True)
    return Attempt(folder, argv[2:]).main()


if __name__ == "__main__":
    sys.exit(console.run(lambda: main(sys.argv[1:])))
