"""The scheduler `local`: starts runs on this machine one at a time, in the order of submission, so that none disturbs another.

The queue is the run folders themselves: a run that was submitted and has not started waits. A runner process, detached from
the terminal, starts one run after another. If it is killed, the next `jobs submit` starts another runner, which waits for a run
that is still running and then continues.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import gethostname

import msgspec
import psutil

from jobs import claim
from jobs.attempt import CHANGED
from jobs.scheduler import How, Own, Seen
from shardlab import files, host
from shardlab.decoders import DECODE_FAULTS
from shardlab.errors import ShardlabError, WorkspaceError
from shardlab.record import Event
from shardlab.rundir import RunDir
from shardlab.state import FINAL, Verdict
from shardlab.workspace import Workspace

NAME = "local"
TEMPLATE = "launch/local.sh.j2"
TEMPLATES = (TEMPLATE,)
SCRIPT = "job.sh"
POLL_S = 0.5
TURN_S = 0.2  # how often the runner looks whether it is the next one's turn
PROCESS = {"pid", "created", "boot_id"}  # data of the event `started` that identify a process
CLAIM_TO_START_S = 10.0  # a supervisor that lives writes its first event within milliseconds of its claim


class Runner(msgspec.Struct, frozen=True):
    """.shardlab/local/runner.json: which process works the queue off."""

    schema: int
    pid: int
    created: float
    boot_id: str


def submit(workspace: Workspace, folders: Sequence[RunDir], how: How) -> None:
    """Submit runs, in order, and start a runner if none is alive. The runs start one at a time, whatever `how` says."""
    for folder in folders:
        folder.write_event("controller", "submitted", scheduler=NAME)
    ensure_runner(workspace)


def ensure_runner(workspace: Workspace) -> None:
    """Start a runner; it ends by itself if another runner is alive or no run waits."""
    files.make_folder(workspace.own / "local")
    with files.as_workspace_error("write"), (workspace.own / "local" / "runner.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "jobs.schedulers.local", str(workspace.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C and the closing of the terminal end this command, not the runs
        )


def runner_alive(workspace: Workspace) -> bool:
    """Whether the runner that runner.json names is alive."""
    try:
        runner = msgspec.json.decode((workspace.own / "local" / "runner.json").read_bytes(), type=Runner)
    except (OSError, *DECODE_FAULTS):
        return False
    return _alive(runner.pid, runner.created, runner.boot_id)


def resolve(workspace: Workspace) -> list[str]:
    """Does nothing: no submission can be interrupted, because the queue is the run folders."""
    return []


def attend(workspace: Workspace) -> None:
    """Start a runner if runs wait and no runner is alive: somebody may have killed it."""
    if not runner_alive(workspace) and _next(workspace) is not None:
        ensure_runner(workspace)


def observe(workspace: Workspace, runs: Sequence[Own]) -> list[Seen]:
    """From the runs' events and the processes of this machine."""
    return [Seen(*_observe(workspace, one.folder, one.verdict)) for one in runs]


def cancel(workspace: Workspace, runs: Sequence[Own]) -> None:
    """Cancel waiting runs first, so that none of them starts meanwhile."""
    for one in sorted(runs, key=lambda one: one.verdict.state == "running"):
        _cancel(one.folder, one.folder.judge())


def cancel_jobs(_jobs: Sequence[str]) -> str:
    """There is no job beside the run."""
    return ""


def damaged(_workspace: Workspace) -> list[str]:
    """The queue is the run folders: no other record can be damaged."""
    return []


def _observe(workspace: Workspace, folder: RunDir, verdict: Verdict) -> tuple[Verdict, str, str]:
    verdict, raw = _true(workspace, folder, verdict)
    return verdict, folder.run_id, raw


def _true(workspace: Workspace, folder: RunDir, verdict: Verdict) -> tuple[Verdict, str]:
    """(the verdict on a run, this scheduler's words for its state)."""
    if verdict.state == "pending":
        return verdict, "queued" if runner_alive(workspace) else "queued, but no runner is alive: `jobs submit` starts a runner"
    if verdict.state != "running":
        return verdict, "ended" if verdict.state not in ("planned", "unknown") else "-"
    started = _started(folder)
    if started is None:
        return verdict, "-"
    if started.host != gethostname():
        return verdict, f"process {started.data['pid']} on {started.host}, which this machine cannot check"
    if _alive_event(started):
        return verdict, f"process {started.data['pid']}"
    verdict = folder.judge()  # it may have ended between the two looks
    if verdict.state != "running":
        return verdict, "ended"
    return _vanished(started), "process gone"


def _cancel(folder: RunDir, verdict: Verdict) -> None:
    """End a run that waits or runs; one that ended is left alone."""
    if verdict.state in ("planned", "pending"):
        if claim.withhold(folder):
            return
        verdict = folder.judge()
    if verdict.state in FINAL:
        return
    folder.write_event("controller", "cancel_requested")  # its supervisor may have claimed it without an event so far
    started = _started(folder)
    if started is not None and _alive_event(started):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(started.data["pid"]), signal.SIGTERM)


def work(workspace: Workspace) -> int:
    """The runner: until no run waits, wait for the running run, then start the next. There is one runner per workspace."""
    files.make_folder(workspace.own / "local")
    while _next(workspace) is not None:
        with _lock(workspace) as mine:
            if not mine:
                return 0  # the other runner looks again after it lets the lock go
            me = psutil.Process()
            record = Runner(schema=1, pid=me.pid, created=me.create_time(), boot_id=host.boot_id())
            files.write_json(workspace.own / "local" / "runner.json", record)
            while (folder := _next(workspace)) is not None:
                _wait_for_running(workspace)
                # The state tells this refusal from a command of the run that ended with the same exit code.
                if _start(folder) == CHANGED and folder.judge().state == "planned":
                    _hold(workspace, folder)
    return 0


def _start(folder: RunDir) -> int:
    """Run one script to its end, in a session of its own, so that it outlives this process; its exit code."""
    folder.log.mkdir(exist_ok=True)
    with (folder.log / "script.log").open("ab") as log:
        process = subprocess.Popen(
            ["bash", str(folder.path / SCRIPT)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    code = process.wait()
    if folder.judge().state == "pending":
        # The script itself did not get as far as its supervisor: without this it would wait, and be started, for ever.
        with contextlib.suppress(FileExistsError):
            folder.claim.mkdir()
        why = f"the script ended with exit code {code} before it started anything; see log/script.log"
        folder.write_event("queue", "exited", code=code, reason="failed", why=why)
    return code


def _hold(workspace: Workspace, refused: RunDir) -> None:
    """Make every waiting run with the digest of the refused run `planned` again: each of them would be refused as well."""
    environment, why = refused.read_run().environment, refused.judge().why
    for folder in _waiting(workspace):
        if folder.read_run().environment == environment:
            folder.write_event("queue", "refused", why=why)


def _next(workspace: Workspace) -> RunDir | None:
    return next(_waiting(workspace), None)


def _waiting(workspace: Workspace) -> Iterator[RunDir]:
    """The runs that were sent and wait, first sent first. A run whose records are damaged is set aside."""
    found = []
    for folder in workspace.all_runs():
        if folder.claim.exists():
            continue
        with contextlib.suppress(ShardlabError):
            sent = [event for event in folder.events(strict=True) if event.event in ("submitted", "refused")]
            if sent and sent[-1].event == "submitted":
                found.append((sent[0].wall_s, folder.run_id, folder))
    for _, _, folder in sorted(found, key=lambda entry: entry[:2]):
        with contextlib.suppress(ShardlabError):
            folder.read_run()
            yield folder


def _wait_for_running(workspace: Workspace) -> None:
    """Wait for runs that an earlier runner left at work; write down the end of one whose supervisor is gone."""
    for folder in workspace.all_runs():
        with contextlib.suppress(ShardlabError):  # a run whose records cannot be read is set aside
            _wait_for_end(folder)


def _wait_for_end(folder: RunDir) -> None:
    while folder.claim.exists() and (state := folder.judge().state) in ("pending", "running"):
        started = _started(folder)
        if started is not None and started.host != gethostname():
            break
        lost = None
        if started is None and time.time() - folder.claim.stat().st_mtime > CLAIM_TO_START_S:
            lost = Verdict("failed", "it was claimed, but its supervisor was killed before it started anything")
        elif started is not None and not _alive_event(started) and folder.judge().state == state:
            lost = _vanished(started)
        if lost is not None:
            folder.write_event("queue", "exited", code=None, reason=lost.state, why=lost.why)
        else:
            time.sleep(TURN_S)


def _vanished(started: Event) -> Verdict:
    if started.data.get("boot_id") != host.boot_id():
        return Verdict("node_fail", "the machine restarted while the run was running")
    return Verdict("failed", "its supervisor ended without recording an end; the run was killed from outside")


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


@contextlib.contextmanager
def _lock(workspace: Workspace) -> Iterator[bool]:
    """Whether this process is the only runner. The kernel releases the lock, however the process ends."""
    with (workspace.own / "local" / "runner.lock").open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


if __name__ == "__main__":
    try:
        sys.exit(work(Workspace(Path(sys.argv[1]))))
    except (WorkspaceError, FileNotFoundError) as error:
        sys.exit(f"the runner stops: {error}")
