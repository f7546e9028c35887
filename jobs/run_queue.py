"""The queue of runs for schedulers that start runs themselves (local, ssh, allocation).

There is no queue file: a run is in the queue if the events in its folder say that it was submitted and has not started. A
runner process, detached from the terminal, starts the runs. If the runner is killed, the next `jobs submit` starts another
runner, which finds the runs that are still running and continues with the queue.
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
from jobs.scheduler import ObservedRun, RunOnDisk, Scheduler, SubmitOptions
from shardlab.cluster import cloudlab_keys
from shardlab.errors import ShardlabError, WorkspaceError
from shardlab.files import files, json_file, plugin_source
from shardlab.hardware import host
from shardlab.record_types import BootId, ProcessId, WallTime
from shardlab.runs.record import Event
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL_STATES, HOLDING_EVENTS, JudgedState
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

SCRIPT_NAME = "job.sh"
CHECK_INTERVAL_S = 0.2  # seconds between two checks of a runner whether the next run may start
PROCESS_KEYS = {"pid", "created", "boot_id"}  # keys in the data of the event `started`, which together identify a process
CANNOT_CHECK_CLAUSE = ", which this machine cannot check"
# If a claimed run has no event after this time, its supervisor is dead: normally the first event follows within milliseconds.
CLAIM_TO_START_S = 10.0


class Runner(msgspec.Struct, frozen=True):
    """The file .shardlab/SCHEDULER/runner.json: identifies the process that starts the runs of the workspace."""

    schema: int
    """The version of the file."""
    pid: ProcessId
    """The process id."""
    created: WallTime
    """When the process started, in seconds since the epoch."""
    boot_id: BootId
    """The boot id of the machine on which the process runs."""


class AnotherRunner(Exception):
    """Raised if another process holds the lock of the runner, and so is already the runner of this workspace."""


def list_waiting_files(workspace: Workspace) -> list[Path]:
    """The files that a runner of this workspace would execute: those of the runs that wait in a queue."""
    return [
        path
        for scheduler_name in ("local", "ssh")
        for run in RunQueue(scheduler_name, workspace).list_waiting_runs()
        for path in list_executed_files(run)
    ]


def list_executed_files(run_dir: RunDir) -> list[Path]:
    """The files of a run that decide what starts: its script, run.json, and the code of its own workload and strategy."""
    return [path for path in (run_dir.path / SCRIPT_NAME, run_dir.run_json) if path.is_file()] + list_code_files(run_dir)


def list_code_files(run_dir: RunDir) -> list[Path]:
    """The files in the folder of a run that contain the code of the run's own workload and strategy."""
    code_paths = (
        path for folder_name in plugin_source.CARRIED_FOLDERS for path in sorted((run_dir.path / folder_name).glob("*"))
    )
    return [path for path in code_paths if path.is_file()]


class RunQueue:
    """The queue of one scheduler in a workspace. Its runner is the process `python -m jobs.schedulers.SCHEDULER WORKSPACE`."""

    def __init__(self, scheduler: str, workspace: Workspace) -> None:
        self._scheduler, self._workspace = scheduler, workspace
        self._folder = workspace.shardlab_folder / scheduler

    def ensure_runner(self) -> None:
        """Start a runner. The new runner ends by itself if another runner is alive or if no run waits."""
        files.make_folder(self._folder)
        with files.as_workspace_error("write"), files.open_append(self._folder / "runner.log") as log_file:
            subprocess.Popen(
                [sys.executable, "-P", "-m", f"jobs.schedulers.{self._scheduler}", str(self._workspace.path)],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C, or closing the terminal, must end this command but not the runs
            )

    def is_runner_alive(self) -> bool:
        """Whether the runner that runner.json names is alive."""
        return self._read_runner() is not None

    def read_runner_variable(self, variable: str) -> str | None:
        """The value of an environment variable of the runner; '' if the variable is not set. None if no runner is alive, or if
        the runner belongs to another user."""
        if (runner := self._read_runner()) is None:
            return None
        try:
            return psutil.Process(runner.pid).environ().get(variable, "")
        except psutil.Error:
            return None

    def _read_runner(self) -> Runner | None:
        runner = json_file.read_json_if_valid(self._folder / "runner.json", Runner)
        return runner if runner is not None and _is_process_alive(runner.pid, runner.created, runner.boot_id) else None

    def observe_run(self, run_dir: RunDir, verdict: JudgedState) -> ObservedRun:
        """The state of a run, from its events and from the processes of this machine. verdict: its state by its events."""
        verdict, scheduler_words = self._check_verdict(run_dir, verdict)
        return ObservedRun(
            verdict, run_dir.run_id, scheduler_words, is_unanswered=scheduler_words.endswith(CANNOT_CHECK_CLAUSE)
        )

    def _check_verdict(self, run_dir: RunDir, verdict: JudgedState) -> tuple[JudgedState, str]:
        """Correct the state of a run by what this machine can check. Returns (the state, the scheduler's words for the state).

        verdict: the state by the events of the run.
        """
        if verdict.held:
            return verdict, "held"
        if (
            verdict.state == "pending"
            and (claim_event := _find_claim_event(run_dir)) is not None
            and claim_event.host == gethostname()
        ):
            if _is_supervisor_alive(claim_event):
                return (verdict, "its search starts it")
            return (_judge_vanished_run(claim_event), "process gone")
        if verdict.state == "pending":
            if not self.is_runner_alive():
                return verdict, "queued, but no runner is alive: `jobs submit` starts a runner"
            queued_event = next((event for event in reversed(run_dir.read_events()) if event.event == "queued"), None)
            return verdict, f"queued: {queued_event.data.get('why', '')}" if queued_event is not None else "queued"
        if verdict.state != "running":
            return verdict, "ended" if verdict.state not in ("planned", "unknown") else "-"
        start_event = _find_start_event(run_dir)
        if start_event is None:
            return verdict, "-"
        if start_event.host != gethostname():
            return verdict, f"process {start_event.data['pid']} on {start_event.host}{CANNOT_CHECK_CLAUSE}"
        if _is_supervisor_alive(start_event):
            return verdict, f"process {start_event.data['pid']}"
        verdict = run_dir.judge()  # read the events again: the run may have ended before its process was checked
        if verdict.state != "running":
            return verdict, "ended"
        return _judge_vanished_run(start_event), "process gone"

    def run_until_empty(self, start_runs: Callable[[], None]) -> int:
        """The main loop of a runner: call `start_runs` until no run waits; return the exit code.

        start_runs: starts the waiting runs. A lock makes sure that the queue of a workspace has only one runner.
        """
        files.make_folder(self._folder)
        while next(self.list_startable_runs(), None) is not None:
            try:
                with files.hold_lock(self._folder / "runner.lock", _raise_another_runner):
                    this_process = psutil.Process()
                    own_runner = Runner(
                        schema=1, pid=this_process.pid, created=this_process.create_time(), boot_id=host.read_boot_id()
                    )
                    files.write_json(self._folder / "runner.json", own_runner)
                    start_runs()
            # another process is the runner; it checks for waiting runs once more after it has released the lock
            except AnotherRunner:
                break
        return 0

    def list_waiting_runs(self) -> Iterator[RunDir]:
        """The runs that were submitted and wait, in the order of their submission. Runs whose records are damaged are left
        out."""
        waiting_runs = []
        for run_dir in self._workspace.list_run_dirs():
            if run_dir.claim.exists():
                continue
            with contextlib.suppress(ShardlabError):
                queue_events = [
                    event
                    for event in run_dir.read_events(strict=True)
                    if event.event in ("submitted", "refused", *HOLDING_EVENTS)
                ]
                if queue_events and queue_events[-1].event in ("submitted", "released"):
                    waiting_runs.append((queue_events[0].wall_s, run_dir.run_id, run_dir))
        for _, _, run_dir in sorted(waiting_runs, key=lambda entry: entry[:2]):
            with contextlib.suppress(ShardlabError):
                if run_dir.read_run().scheduler == self._scheduler:
                    yield run_dir

    def list_startable_runs(self) -> Iterator[RunDir]:
        """The waiting runs that this user may start. A run of unknown origin stays where it is until its user says --trust."""
        return (
            waiting_run
            for waiting_run in self.list_waiting_runs()
            if workspace_trust.is_allowed(self._workspace, list_executed_files(waiting_run))
        )

    def start_one_after_another(self, may_start: Callable[[RunDir], bool]) -> None:
        """Start the waiting runs one after another, until no run waits. A run starts only when no other run of the workspace is
        running on this machine. may_start: `QueueScheduler.may_start`, which is called before each start."""
        while (next_run := next(self.list_startable_runs(), None)) is not None:
            self.wait_for_running()
            if may_start(next_run):
                self.record_failed_start(next_run, start_script(next_run).wait())

    def record_failed_start(self, run_dir: RunDir, exit_code: int) -> None:
        """Record a failure if the script of a run ended before the supervisor started. exit_code: the exit code of the
        script."""
        verdict = run_dir.judge()
        if verdict.state == "pending" and not verdict.held:
            # The supervisor has not recorded anything, so without this record the run would wait and be started again for ever.
            why = f"the script ended with exit code {exit_code} before it started anything; see log/script.log"
            record_failure(run_dir, why, exit_code)

    def wait_for_running(self) -> None:
        """Wait until the runs that an earlier runner started have ended. If the supervisor of a run is gone, record the end of
        the run."""
        for run_dir in self._workspace.list_run_dirs():
            with contextlib.suppress(ShardlabError):  # a run whose records cannot be read is skipped
                while is_running(run_dir):
                    time.sleep(CHECK_INTERVAL_S)

    def record_lost_runs(self) -> None:
        """Record the end of each run whose supervisor is gone, without waiting for the runs that are still running."""
        for run_dir in self._workspace.list_run_dirs():
            with contextlib.suppress(ShardlabError):
                is_running(run_dir)


class QueueScheduler(Scheduler):
    """A scheduler that starts runs itself. Its module is the program of its runner. A submission cannot be left half done, held
    runs need no request, and no record but those of the runs can be damaged, because the queue consists of the run folders."""

    SCRIPT = SCRIPT_NAME
    POLL_S = 0.5

    def submit(self, workspace: Workspace, run_dirs: Sequence[RunDir], submit_options: SubmitOptions) -> None:
        """Submit runs, in this order, and start a runner if no runner is alive. `submit_options` is ignored: the runner decides
        how many runs start at a time."""
        for run_dir in run_dirs:
            run_dir.write_event("controller", "submitted", scheduler=self.NAME)
        workspace_trust.extend_consent(workspace, *(path for run_dir in run_dirs for path in list_executed_files(run_dir)))
        RunQueue(self.NAME, workspace).ensure_runner()

    def restart_lost_runner(self, workspace: Workspace) -> None:
        """Start a runner if runs wait and no runner is alive, because the runner may have been killed. Does nothing for runs
        that this user may not start."""
        queue = RunQueue(self.NAME, workspace)
        if not queue.is_runner_alive() and next(queue.list_startable_runs(), None) is not None:
            queue.ensure_runner()

    def observe(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
        """The state of each run, from its events and from the processes of this machine."""
        queue = RunQueue(self.NAME, workspace)
        return [queue.observe_run(run.run_dir, run.verdict) for run in runs]

    def cancel(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> None:
        """Cancel runs. Waiting runs are cancelled first, so that no waiting run starts when a running run ends. For a running
        run, the request is written as an event, which its supervisor reads, also on another machine."""
        for run in sorted(runs, key=lambda run: run.verdict.state == "running"):
            _cancel_run(run.run_dir, run.run_dir.judge())

    def start_runs(self, workspace: Workspace, queue: RunQueue) -> None:
        """Start the waiting runs one after another until no run waits."""
        queue.start_one_after_another(self.may_start)

    def may_start(self, run_dir: RunDir) -> bool:
        """Whether a run may start now. To prevent the start, this method returns False and records an event, after which the
        run no longer waits."""
        return True

    def work_as_runner(self, workspace: Workspace) -> int:
        """The work of the runner: start the waiting runs; return the exit code. A workspace has only one runner at a time."""
        queue = RunQueue(self.NAME, workspace)
        return queue.run_until_empty(lambda: self.start_runs(workspace, queue))

    def run_as_runner(self) -> None:
        """The main program of a runner, whose only argument is the workspace. Ends this process."""
        try:
            sys.exit(self.work_as_runner(Workspace(Path(sys.argv[1]))))
        except (WorkspaceError, FileNotFoundError) as error:
            sys.exit(f"the runner stops: {error}")


def start_script(
    run_dir: RunDir, environment: Mapping[str, str] | None = None, inherited_descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start the script of a run in a new session, so that the script continues if this process ends.

    environment: additional variables. inherited_descriptors: the file descriptors that the script inherits, such as locks.
    """
    run_dir.log.mkdir(exist_ok=True)
    own_environment = {name: value for name, value in os.environ.items() if name != cloudlab_keys.TOKEN_VARIABLE}
    with files.open_append(run_dir.log / "script.log") as log_file:
        return subprocess.Popen(
            ["bash", str(run_dir.path / SCRIPT_NAME)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            env={**own_environment, **(environment or {})},
            pass_fds=inherited_descriptors,
            start_new_session=True,
        )


def record_failure(run_dir: RunDir, why: str, exit_code: int | None = None) -> None:
    """Record that a run failed before its start, and claim the run so that nothing starts it. exit_code: the exit code of the
    run's script."""
    with contextlib.suppress(FileExistsError):
        run_dir.claim.mkdir()
    run_dir.write_event("queue", "exited", code=exit_code, reason="failed", why=why)


def is_running(run_dir: RunDir) -> bool:
    """Whether the run has a supervisor on this machine that is still alive. If its supervisor on this machine is gone, the end
    of the run is recorded. A run that is a try of a search counts as running as long as the process of the search starts
    further tries."""
    if not run_dir.claim.exists():
        return False
    state, start_event = run_dir.judge().state, _find_start_event(run_dir) or _find_claim_event(run_dir)
    if state not in ("pending", "running"):
        return start_event is not None and start_event.data.get("search") is True and _is_supervisor_alive(start_event)
    if start_event is not None and start_event.host != gethostname():
        return False
    lost_state = None
    if start_event is None and time.time() - run_dir.claim.stat().st_mtime > CLAIM_TO_START_S:
        lost_state = JudgedState("failed", "it was claimed, but its supervisor was killed before it started anything")
    elif start_event is not None and not _is_supervisor_alive(start_event) and run_dir.judge().state == state:
        lost_state = _judge_vanished_run(start_event)
    if lost_state is not None:
        run_dir.write_event("queue", "exited", code=None, reason=lost_state.state, why=lost_state.why)
    return lost_state is None


def _raise_another_runner(_lock: int) -> None:
    raise AnotherRunner


def _cancel_run(run_dir: RunDir, verdict: JudgedState) -> None:
    """Cancel a run that waits or runs. A run that has ended does not change. verdict: the state of the run."""
    if verdict.state in ("planned", "pending"):
        if claim.claim_as_cancelled(run_dir):
            return
        verdict = run_dir.judge()
    start_event = _find_start_event(run_dir)
    if verdict.state in FINAL_STATES:
        if start_event is not None and start_event.data.get("search") is True:
            # the process of the search reads this event before the next try
            run_dir.write_event("controller", "cancel_requested")
        return
    # A supervisor that has claimed the run but not yet written an event sees this request when it begins to watch the run.
    run_dir.write_event("controller", "cancel_requested")
    if (
        start_event is not None
        and _is_supervisor_alive(start_event)
        and _does_process_name_run(start_event.data["pid"], run_dir)
    ):
        with contextlib.suppress(ProcessLookupError):
            os.kill(start_event.data["pid"], signal.SIGTERM)


def _does_process_name_run(pid: int, run_dir: RunDir) -> bool:
    """Whether the environment or the command line of a process names the run's folder. Those of its supervisor do (PWD), for
    the script of a run begins with `cd`; the records of a run may name any process."""
    try:
        process = psutil.Process(pid)
        process_words = [*process.environ().values(), *process.cmdline()]
    except (psutil.Error, OSError):
        return False
    return any(word.startswith("/") and os.path.realpath(word) == os.path.realpath(run_dir.path) for word in process_words)


def _judge_vanished_run(start_event: Event) -> JudgedState:
    if start_event.data.get("boot_id") != host.read_boot_id():
        return JudgedState("node_fail", "the machine restarted while the run was running")
    return JudgedState("failed", "its supervisor ended without recording an end; the run was killed from outside")


def _find_start_event(run_dir: RunDir) -> Event | None:
    return next(
        (event for event in run_dir.read_events() if event.event == "started" and event.data.keys() >= PROCESS_KEYS), None
    )


def _find_claim_event(run_dir: RunDir) -> Event | None:
    """The event `submitted` of a try that the process of its search created, with the data that identify this process. None for
    any other run."""
    return next(
        (event for event in run_dir.read_events() if event.event == "submitted" and event.data.keys() >= PROCESS_KEYS), None
    )


def _is_supervisor_alive(start_event: Event) -> bool:
    event_data = start_event.data
    return _is_process_alive(int(event_data["pid"]), float(event_data["created"]), str(event_data["boot_id"]))


def _is_process_alive(pid: int, created_s: float, boot_id: str) -> bool:
    """Whether the process is alive. Its start time and the boot id are compared too, because the system may have given the
    process id to another process."""
    if boot_id != host.read_boot_id():
        return False
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
