"""Starts the telemetry sampler and the ranks on a node, and ends every process that a run leaves behind there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname

import psutil

from shardlab import node_folder
from shardlab.errors import ShardlabError
from shardlab.record import SAMPLER_ENDED
from shardlab.rundir import RunDir

SAMPLER_STARTS = 4  # of the sampler on a node: what ends it so often, such as a full disk, does not pass
GRACE_S = 10.0  # from SIGTERM to SIGKILL, so that ranks can close their records
MARK = "SHARDLAB_RUN"  # variable of every process of a run, by which leftover processes are found
_PR_SET_PDEATHSIG = 1
_OF_JOB = re.compile(r".*/job_\d+(?=/|$)")  # as Slurm names it


class CannotStart(ShardlabError):
    """The program that starts the ranks is missing on this node, or may not be run."""


class Sampler:
    """The telemetry of this node, in a process of its own, which ends when this process ends. Starts it again if it dies."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self._hz = folder.read_run().cell.instruments.telemetry_hz
        self._starts = 0
        self._process = self._start()

    def look(self) -> None:
        """If the sampler died, record the event SAMPLER_ENDED and start it again, SAMPLER_STARTS times at most."""
        code = self._process.poll()
        if code and self._starts <= SAMPLER_STARTS:  # 0: a signal ended it, as Slurm sends to all processes of a job
            self._folder.write_event(f"node-{gethostname()}", SAMPLER_ENDED, sync=False, code=code)
            if self._starts < SAMPLER_STARTS:
                self._process = self._start()
            else:
                self._starts += 1

    def end(self) -> None:
        """End the sampler; it gets two seconds to write its last sample."""
        end(self._process, signal.SIGTERM, 2.0)

    def _start(self) -> subprocess.Popen[bytes]:
        self._starts += 1
        out = self._folder.samples_file(gethostname())
        command = [sys.executable, "-m", "collect", "sample", f"--out={out}", f"--hz={self._hz:g}"]
        command.append(f"--parent={os.getpid()}")  # it ends when we do, however we end
        with (self._folder.log / f"sampler.{gethostname()}.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def start(command: list[str], log: int | None, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the program that starts the ranks, in a session of its own; it ends when this process ends. log: a descriptor, or
    None for the output that this process has. Raises CannotStart."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
    except OSError as error:
        how = "is not installed" if isinstance(error, FileNotFoundError) else f"cannot be started ({error.strerror})"
        raise CannotStart(f"{command[0]} {how} on {gethostname()}.") from None


def end(process: subprocess.Popen[bytes], first: signal.Signals, grace_s: float) -> int:
    """Send the signal `first` to a process, kill it after grace_s, and return its exit code."""
    try:
        os.kill(process.pid, first)
        return process.wait(grace_s)
    except ProcessLookupError:
        return process.wait()
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def end_strays(mark: str) -> None:
    """Kill every process with this mark, in any session: launchers give each rank a session of its own."""
    while strays := [process for process in psutil.process_iter() if _is_marked(process, mark)]:
        for process in strays:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(strays, timeout=1)


def remove_data_copies(folder: RunDir) -> None:
    """Remove the copies of data sets on this node that no process uses: the last rank removes them, unless it was killed.

    The fork server ends its ranks by itself, so a rank may use the copy of this run for a moment longer.
    """
    ends = time.monotonic() + GRACE_S
    with contextlib.suppress(ShardlabError):  # the next run on this node removes them
        if folder.read_run().data_stage != "node":
            return
        while node_folder.name_of(folder.path) in node_folder.remove_unused() and time.monotonic() < ends:
            time.sleep(0.1)


def is_of(pid: int, folder: RunDir) -> bool:
    """Whether a process belongs to the run in this folder. False if its environment cannot be read."""
    try:
        return psutil.Process(pid).environ().get(MARK, "").partition("#")[0] == str(folder.path)
    except (psutil.Error, OSError):
        return False


def oom_kills() -> int:
    """Number of processes that the kernel killed because memory ran out: in this job if the job's cgroup counts them, otherwise
    on this machine since its boot, whoever owned them. 0 if the kernel does not count them."""
    for line in oom_counter(Path("/proc/self/cgroup").read_text()).read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def oom_counter(cgroups: str, tree: Path = Path("/sys/fs/cgroup")) -> Path:
    """The file with the counter. cgroups: the text of /proc/self/cgroup.

    A job's own cgroup (version 2, which includes the cgroups below it) counts no processes of other jobs.
    """
    own = next((line.removeprefix("0::") for line in cgroups.splitlines() if line.startswith("0::")), "")
    if match := _OF_JOB.match(own):
        events = tree / match[0].lstrip("/") / "memory.events"
        if events.exists():
            return events
    return Path("/proc/vmstat")


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
