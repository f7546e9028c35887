"""The queue of a scheduler that starts runs itself: runs that were submitted wait in their folders until a runner starts them.

The queue is the run folders themselves: a run that was submitted and has not started waits. A runner process, detached from
the terminal, starts the runs. If it is killed, the next `jobs submit` starts another runner, which sees the runs that are still
running and continues.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from socket import gethostname

import msgspec
import psutil

from jobs import claim
from jobs.scheduler import ObservedRun, RunOnDisk
from shardlab import cloudlab_keys, files, host, workspace_trust
from shardlab.decoders import DECODE_FAULTS
from shardlab.errors import ShardlabError, WorkspaceError
from shardlab.record import Event
from shardlab.rundir import RunDir
from shardlab.state import FINAL, HOLDING, JudgedState
from shardlab.workspace import Workspace

SCRIPT = "job.sh"
TURN_S = 0.2  # how often a runner looks whether it is the next one's turn
PROCESS = {"pid", "created", "boot_id"}  # data of the event `started` that identify a process
ELSEWHERE = ", which this machine cannot check"
CLAIM_TO_START_S = 10.0  # a supervisor that lives writes its first event within milliseconds of its claim


class Runner(msgspec.Struct, frozen=True):
    """.shardlab/SCHEDULER/runner.json: which process starts the runs."""

    schema: int
    pid: int
    created: float
    boot_id: str


class AnotherRunner(Exception):
    """Another process starts the runs of this workspace."""


def scripts_must_be_trusted(workspace: Workspace, *, trusted: bool) -> None:
    """Raises InputError if a runner would start scripts that came with the workspace. trusted: mark it as trusted."""
    waiting = [folder for name in ("local", "ssh") for folder in RunQueue(name, workspace).waiting()]
    workspace_trust.must_be_trusted(workspace, [folder.path / SCRIPT for folder in waiting], trusted=trusted)


class RunQueue:
    """The runs of a workspace that one scheduler starts. Its runner is the process `python -m jobs.schedulers.SCHEDULER`."""

    def __init__(self, scheduler: str, workspace: Workspace) -> None:
        self._scheduler, self._workspace = scheduler, workspace
        self._own = workspace.own / scheduler

    def submit(self, folders: Sequence[RunDir]) -> None:
        """Submit runs, in order, and start a runner if none is alive."""
        for folder in folders:
            folder.write_event("controller", "submitted", scheduler=self._scheduler)
        self._ensure_runner()

    def _ensure_runner(self) -> None:
        """Start a runner; it ends by itself if another runner is alive or no run waits."""
        files.make_folder(self._own)
        with files.as_workspace_error("write"), (self._own / "runner.log").open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-P", "-m", f"jobs.schedulers.{self._scheduler}", str(self._workspace.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C and the closing of the terminal end this command, not the runs
            )

    def runner_alive(self) -> bool:
        """Whether the runner that runner.json names is alive."""
        return self._runner() is not None

    def runner_variable(self, name: str) -> str | None:
        """A variable of the runner's environment, '' if it is not set; None if no runner is alive, or it is another user's."""
        if (runner := self._runner()) is None:
            return None
        try:
            return psutil.Process(runner.pid).environ().get(name, "")
        except psutil.Error:
            return None

    def _runner(self) -> Runner | None:
        try:
            runner = msgspec.json.decode((self._own / "runner.json").read_bytes(), type=Runner)
        except (OSError, *DECODE_FAULTS):
            return None
        return runner if _alive(runner.pid, runner.created, runner.boot_id) else None

    def attend(self) -> None:
        """Start a runner if runs wait and no runner is alive: somebody may have killed it."""
        if workspace_trust.is_trusted(self._workspace) and not self.runner_alive() and next(self.waiting(), None) is not None:
            self._ensure_runner()

    def observe(self, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
        """From the runs' events and the processes of this machine."""
        return [self._observe(run.folder, run.verdict) for run in runs]

    def _observe(self, folder: RunDir, verdict: JudgedState) -> ObservedRun:
        verdict, raw = self._true(folder, verdict)
        return ObservedRun(verdict, folder.run_id, raw, unanswered=raw.endswith(ELSEWHERE))

    def _true(self, folder: RunDir, verdict: JudgedState) -> tuple[JudgedState, str]:
        """(the verdict on a run, this scheduler's words for its state)."""
        if verdict.held:
            return verdict, "held"
        if verdict.state == "pending":
            if not self.runner_alive():
                return verdict, "queued, but no runner is alive: `jobs submit` starts a runner"
            waits = next((event for event in reversed(folder.events()) if event.event == "queued"), None)
            return verdict, f"queued: {waits.data.get('why', '')}" if waits is not None else "queued"
        if verdict.state != "running":
            return verdict, "ended" if verdict.state not in ("planned", "unknown") else "-"
        started = _started(folder)
        if started is None:
            return verdict, "-"
        if started.host != gethostname():
            return verdict, f"process {started.data['pid']} on {started.host}{ELSEWHERE}"
        if _alive_event(started):
            return verdict, f"process {started.data['pid']}"
        verdict = folder.judge()  # it may have ended between the two looks
        if verdict.state != "running":
            return verdict, "ended"
        return _vanished(started), "process gone"

    def work_off(self, start_runs: Callable[[], None]) -> int:
        """The runner: until no run waits, call `start_runs`. There is one runner per workspace."""
        files.make_folder(self._own)
        while next(self.waiting(), None) is not None:
            try:
                with files.locked(self._own / "runner.lock", _leave):
                    me = psutil.Process()
                    record = Runner(schema=1, pid=me.pid, created=me.create_time(), boot_id=host.boot_id())
                    files.write_json(self._own / "runner.json", record)
                    start_runs()
            except AnotherRunner:  # it looks for waiting runs once more after it has released the lock
                break
        return 0

    def waiting(self) -> Iterator[RunDir]:
        """The runs that were submitted and wait, first submitted first. A run whose records are damaged is set aside."""
        waiting = []
        for folder in self._workspace.all_runs():
            if folder.claim.exists():
                continue
            with contextlib.suppress(ShardlabError):
                sent = [event for event in folder.events(strict=True) if event.event in ("submitted", "refused", *HOLDING)]
                if sent and sent[-1].event in ("submitted", "released"):
                    waiting.append((sent[0].wall_s, folder.run_id, folder))
        for _, _, folder in sorted(waiting, key=lambda entry: entry[:2]):
            with contextlib.suppress(ShardlabError):
                if folder.read_run().scheduler == self._scheduler:
                    yield folder

    def start_one_after_another(self, may_start: Callable[[RunDir], bool] = lambda _folder: True) -> None:
        """Start each waiting run when no other run of this machine is running, until none waits.

        may_start: called with each run before its start. If it returns False, it has recorded why the run no longer waits.
        """
        while (folder := next(self.waiting(), None)) is not None:
            self.wait_for_running()
            if may_start(folder):
                self.after_end(folder, start(folder).wait())

    def after_end(self, folder: RunDir, code: int) -> None:
        """Record a failure if the script of a run ended before it started anything."""
        verdict = folder.judge()
        if verdict.state == "pending" and not verdict.held:
            # The script itself did not get as far as its supervisor: without this it would wait, and be started, for ever.
            why = f"the script ended with exit code {code} before it started anything; see log/script.log"
            record_failure(folder, why, code)

    def wait_for_running(self) -> None:
        """Wait for runs that an earlier runner started; record the end of a run whose supervisor is gone."""
        for folder in self._workspace.all_runs():
            with contextlib.suppress(ShardlabError):  # a run whose records cannot be read is set aside
                while is_running(folder):
                    time.sleep(TURN_S)

    def record_lost(self) -> None:
        """Record the end of each run whose supervisor is gone, without waiting for those that run."""
        for folder in self._workspace.all_runs():
            with contextlib.suppress(ShardlabError):
                is_running(folder)


# What every scheduler with such a queue does alike; jobs/scheduler.py has their interface.


def resolve(_workspace: Workspace) -> list[str]:
    """Does nothing: no submission can be interrupted, because the queue is the run folders."""
    return []


def cancel(_workspace: Workspace, runs: Sequence[RunOnDisk]) -> None:
    """Cancel waiting runs first, so that none of them starts meanwhile. Supervisors see the request, wherever they are."""
    for run in sorted(runs, key=lambda run: run.verdict.state == "running"):
        _cancel(run.folder, run.folder.judge())


def cancel_jobs(_jobs: Sequence[str]) -> str:
    """Does nothing: a run has no job of its own."""
    return ""


def hold(_jobs: Sequence[str]) -> str:
    """Does nothing: the runner starts no run whose events say that it is held."""
    return ""


def release(_jobs: Sequence[str]) -> None:
    """Does nothing: the queue is the events of the runs."""


def damaged(_workspace: Workspace) -> list[str]:
    """The queue is the run folders: no other record can be damaged."""
    return []


def start(
    folder: RunDir, environment: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start the script of a run in a session of its own, so that it outlives this process. descriptors: what it inherits."""
    folder.log.mkdir(exist_ok=True)
    own = {name: value for name, value in os.environ.items() if name != cloudlab_keys.TOKEN_VARIABLE}
    with (folder.log / "script.log").open("ab") as log:
        return subprocess.Popen(
            ["bash", str(folder.path / SCRIPT)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**own, **(environment or {})},
            pass_fds=descriptors,
            start_new_session=True,
        )


def record_failure(folder: RunDir, why: str, code: int | None = None) -> None:
    """Claim a run that did not start, so that nothing starts it, and record why."""
    with contextlib.suppress(FileExistsError):
        folder.claim.mkdir()
    folder.write_event("queue", "exited", code=code, reason="failed", why=why)


def is_running(folder: RunDir) -> bool:
    """Whether the run has a supervisor on this machine that has to end first. Records the end of a run that has lost it."""
    if not folder.claim.exists() or (state := folder.judge().state) not in ("pending", "running"):
        return False
    started = _started(folder)
    if started is not None and started.host != gethostname():
        return False
    lost = None
    if started is None and time.time() - folder.claim.stat().st_mtime > CLAIM_TO_START_S:
        lost = JudgedState("failed", "it was claimed, but its supervisor was killed before it started anything")
    elif started is not None and not _alive_event(started) and folder.judge().state == state:
        lost = _vanished(started)
    if lost is not None:
        folder.write_event("queue", "exited", code=None, reason=lost.state, why=lost.why)
    return lost is None


def run_as_runner(work: Callable[[Workspace], int]) -> None:
    """The main program of a runner: WORKSPACE is its only argument."""
    try:
        sys.exit(work(Workspace(Path(sys.argv[1]))))
    except (WorkspaceError, FileNotFoundError) as error:
        sys.exit(f"the runner stops: {error}")


def _leave(_lock: int) -> None:
    raise AnotherRunner


def _cancel(folder: RunDir, verdict: JudgedState) -> None:
    """End a run that waits or runs. A run that has ended does not change."""
    if verdict.state in ("planned", "pending"):
        if claim.claim_as_cancelled(folder):
            return
        verdict = folder.judge()
    if verdict.state in FINAL:
        return
    folder.write_event("controller", "cancel_requested")  # its supervisor may have claimed it without an event so far
    started = _started(folder)
    if started is not None and _alive_event(started):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(started.data["pid"]), signal.SIGTERM)


def _vanished(started: Event) -> JudgedState:
    if started.data.get("boot_id") != host.boot_id():
        return JudgedState("node_fail", "the machine restarted while the run was running")
    return JudgedState("failed", "its supervisor ended without recording an end; the run was killed from outside")


def _started(folder: RunDir) -> Event | None:
    return next((event for event in folder.events() if event.event == "started" and event.data.keys() >= PROCESS), None)


def _alive_event(started: Event) -> bool:
    data = started.data
    return _alive(int(data["pid"]), float(data["created"]), str(data["boot_id"]))


def _alive(pid: int, created: float, boot_id: str) -> bool:
    """Whether this very process lives: a process id alone may have been given to another."""
    if boot_id != host.boot_id():
        return False
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
