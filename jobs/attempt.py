"""Supervise one run on the machine where it runs: claim it, start telemetry and ranks, and write down how it ended.

    python -m jobs.attempt RUN_DIR -- COMMAND...

Exit codes: the command's own; 75 where the run is claimed already; 124 at the time limit; 143 where it was cancelled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname
from types import FrameType
from typing import Any

import psutil

from shardlab import console, host
from shardlab.errors import InputError, WorkspaceError
from shardlab.run import SAVE_AT
from shardlab.rundir import RunDir

CLAIMED, TIMEOUT, CANCELLED = 75, 124, 143
SAMPLES_PER_S = 2
# So long before the time limit, or this share of a short limit, ranks that keep checkpoints save.
SAVE_S, SAVE_SHARE = 60.0, 0.2
GRACE_S = 10.0  # from SIGTERM to SIGKILL, so that ranks can close their records
MARK = "SHARDLAB_RUN"  # in the environment of every process of a run, by which one that got away is found
_PR_SET_PDEATHSIG = 1


class Attempt:
    """One run from its claim to its last event."""

    def __init__(self, folder: RunDir, command: list[str]) -> None:
        self.folder = folder
        self.command = command
        self.run = folder.read_run()
        self.cancelled = False

    def main(self) -> int:
        try:
            self.folder.claim.mkdir()
        except FileExistsError:
            print(f"{self.folder.run_id}: claimed already; this start does nothing.", file=sys.stderr)
            return CLAIMED
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "claim") from error
        signal.signal(signal.SIGTERM, self._cancel)
        me = psutil.Process()
        self._event("started", pid=me.pid, created=me.create_time(), boot_id=host.boot_id())
        sampler = self._start_sampler()
        kills_before = _oom_kills()
        code, reason = self._run_command()
        _end(sampler, signal.SIGTERM, 2.0)
        _end_strays(str(self.folder.path))
        if code != 0 and reason is None and _oom_kills() > kills_before:
            self._event("oom", why="out of host memory: the kernel's OOM killer ended a process during the run")
        self._event("exited", code=code, reason=reason, why=self._why(reason))
        return {"timeout": TIMEOUT, "cancelled": CANCELLED}.get(reason or "", code)

    def _event(self, event: str, **data: Any) -> None:
        self.folder.write_event("attempt", event, **data)

    def _cancel(self, _number: int, _frame: FrameType | None) -> None:
        self.cancelled = True

    def _start_sampler(self) -> subprocess.Popen[bytes]:
        out = self.folder.samples_file(gethostname())
        command = [sys.executable, "-m", "collect", "sample", f"--out={out}", f"--hz={SAMPLES_PER_S}"]
        command.append(f"--parent={os.getpid()}")  # it ends when we do, however we end
        with (self.folder.log / "sampler.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _run_command(self) -> tuple[int, str | None]:
        """(exit code, why we ended it or None); a signal's number comes as 128 + number, as in a shell."""
        limit = self.run.cell.time_limit_s
        deadline = time.monotonic() + limit if limit else float("inf")
        with self.folder.job_log.open("ab") as log:
            ranks = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, MARK: str(self.folder.path), **_save_at(limit)},
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        reason = None
        while (code := ranks.poll()) is None:
            if self.cancelled or time.monotonic() > deadline:
                reason = "cancelled" if self.cancelled else "timeout"
                code = _end(ranks, signal.SIGTERM, GRACE_S)
                break
            time.sleep(0.05)
        return (128 - code if code < 0 else code), reason

    def _why(self, reason: str | None) -> str:
        if reason == "timeout":
            return f"ended at its time limit of {self.run.cell.time_limit_s} s"
        return "cancelled while it ran" if reason == "cancelled" else ""


def _save_at(limit_s: int | None) -> dict[str, str]:
    """When ranks are to save and end by themselves, for their environment. By the clock rather than by a signal: not every
    launcher hands a signal on to its ranks."""
    return {SAVE_AT: f"{time.time() + limit_s - min(SAVE_S, SAVE_SHARE * limit_s):.3f}"} if limit_s else {}


def _end(process: subprocess.Popen[bytes], first: signal.Signals, grace_s: float) -> int:
    """Ask a process group or process to end, then make it; its exit code."""
    try:
        os.kill(process.pid, first)
        return process.wait(grace_s)
    except ProcessLookupError:
        return process.wait()
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _end_strays(mark: str) -> None:
    """Kill what the run left behind, in whatever session: launchers give each rank a session of its own."""
    while strays := [process for process in psutil.process_iter() if _is_marked(process, mark)]:
        for process in strays:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(strays, timeout=1)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _oom_kills() -> int:
    """Processes that the kernel killed for want of memory since boot; 0 where it does not count them."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def main(argv: list[str]) -> int:
    if len(argv) < 3 or argv[1] != "--":
        raise InputError("usage: python -m jobs.attempt RUN_DIR -- COMMAND...")
    folder = RunDir(Path(argv[0]).absolute())
    folder.log.mkdir(exist_ok=True)
    return Attempt(folder, argv[2:]).main()


if __name__ == "__main__":
    sys.exit(console.run(lambda: main(sys.argv[1:])))
