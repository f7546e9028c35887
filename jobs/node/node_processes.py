"""Starts the telemetry sampler and the ranks of a run on a node, and ends every process that the run leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname

import psutil

from shardlab.cluster import node_folder
from shardlab.errors import ShardlabError, WorkspaceError
from shardlab.files import files
from shardlab.runs.record import SAMPLER_ENDED, TRACKER_ENDED
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import OOM_ON_MACHINE

# The most starts of the sampler on a node. If the sampler has ended this often, the cause (such as a full disk) is permanent.
MOST_SAMPLER_STARTS = 4
PLAYED_NVML_VARIABLE = "SHARDLAB_PLAYED_NVML"  # environment variable: names a stand-in for NVML, which plays GPUs in rehearsals
TRACKER_END_S = 30.0  # seconds that the tracker has after the end of a run, to compute and log the metrics of the run
GRACE_S = 10.0  # seconds from SIGTERM to SIGKILL, so that ranks can close their records
RUN_MARK_VARIABLE = "SHARDLAB_RUN"  # environment variable of every process of a run, by which leftover processes are found
_PR_SET_PDEATHSIG = 1  # option of Linux's prctl: sets the signal that the kernel sends to this process when its parent ends
_JOB_CGROUP = re.compile(r".*/job_\d+(?=/|$)")  # matches the name that Slurm gives to the cgroup of a job


class CannotStart(ShardlabError):
    """Raised if the program that starts the ranks is missing on this node, or may not be executed."""


class SamplerProcess:
    """Starts the process that samples the telemetry of this node, and starts it again if it dies. The sampler ends when this
    process ends."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        run = run_dir.read_run()
        self._hz = run.cell.instruments.telemetry_hz
        self._played_nvml = os.environ.get(PLAYED_NVML_VARIABLE, "") if run.rehearsal else ""
        self._start_count = 0
        self._process = self._start()

    def restart_if_dead(self) -> None:
        """If the sampler died, record the event SAMPLER_ENDED, and start it again if it has started fewer than
        MOST_SAMPLER_STARTS times."""
        exit_code = self._process.poll()
        # The exit code is 0 if a signal ended the sampler; Slurm sends signals to all processes of a job.
        if exit_code and self._start_count <= MOST_SAMPLER_STARTS:
            self._run_dir.write_event(f"node-{gethostname()}", SAMPLER_ENDED, sync=False, code=exit_code)
            if self._start_count < MOST_SAMPLER_STARTS:
                self._process = self._start()
            else:
                self._start_count += 1

    def end(self) -> None:
        """End the sampler. It has two seconds to write its last sample, and is then killed."""
        end_process(self._process, signal.SIGTERM, 2.0)

    def _start(self) -> subprocess.Popen[bytes]:
        self._start_count += 1
        samples_path = self._run_dir.samples_file(gethostname())
        argv = [sys.executable, "-m", "collect", "sample", f"--out={samples_path}", f"--hz={self._hz:g}"]
        argv += [f"--played={self._played_nvml}"] if self._played_nvml else []
        argv.append(f"--parent={os.getpid()}")  # the sampler ends when this process ends, even if this process is killed
        with files.open_append(self._run_dir.log / f"sampler.{gethostname()}.log") as log_file:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file)


class TrackerProcess:
    """Starts the process that logs a run to an experiment tracker while the run goes on. If that process fails, the run
    continues."""

    def __init__(self, run_dir: RunDir, tracker_name: str) -> None:
        self._run_dir, self._failed = run_dir, False
        self._process: subprocess.Popen[bytes] | None = None
        workspace = run_dir.path.parents[1]
        argv = [sys.executable, "-m", "collect", "track", run_dir.run_id, f"--to={tracker_name}", f"--workspace={workspace}"]
        argv.append(f"--parent={os.getpid()}")  # the tracker ends when this process ends
        with contextlib.suppress(OSError), files.open_append(run_dir.log / "tracker.log") as log_file:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, start_new_session=True
            )

    def record_if_failed(self) -> None:
        """If the tracker failed, record the event TRACKER_ENDED once."""
        exit_code = self._process.poll() if self._process is not None else 1
        if exit_code and not self._failed:
            self._failed = True
            with contextlib.suppress(WorkspaceError):
                self._run_dir.write_event("tracker", TRACKER_ENDED, sync=False, code=exit_code)

    def end(self, wait_s: float = TRACKER_END_S) -> None:
        """Wait until the tracker has logged the end of the run, which it reads from the run's events; kill it after wait_s
        seconds."""
        if self._process is not None:
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.record_if_failed()


def start_process(argv: list[str], log_descriptor: int | None, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the program that starts the ranks, in a new session. The program ends when this process ends.

    log_descriptor: the file descriptor for its output; None: the program writes to the output of this process. Raises
    CannotStart."""
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log_descriptor,
            stderr=log_descriptor,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
    except OSError as error:
        # If PATH has a folder that this user may not read, the error of a missing program is `Permission denied`.
        is_missing = isinstance(error, FileNotFoundError) or shutil.which(argv[0], path=environment.get("PATH")) is None
        problem_clause = "is not installed" if is_missing else f"cannot be started ({error.strerror})"
        raise CannotStart(f"{argv[0]} {problem_clause} on {gethostname()}.") from None


def end_process(process: subprocess.Popen[bytes], first_signal: signal.Signals, grace_s: float) -> int:
    """Send the signal `first_signal` to a process, kill the process if it has not ended after grace_s seconds, and return its
    exit code."""
    try:
        os.kill(process.pid, first_signal)
        return process.wait(grace_s)
    except ProcessLookupError:
        return process.wait()
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def kill_marked_processes(run_mark: str) -> None:
    """Kill every process whose environment variable RUN_MARK_VARIABLE has the value `run_mark`. Processes in other sessions are
    found too, because launchers start each rank in a new session."""
    while marked_processes := [process for process in psutil.process_iter() if _is_marked(process, run_mark)]:
        for process in marked_processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(marked_processes, timeout=1)


def remove_data_copies(run_dir: RunDir) -> None:
    """Remove the copies of data sets on this node's disk that no process uses.

    Normally the last rank of a run removes the copy, but not if that rank was killed. The fork server may end its ranks a
    moment later than this call, so this function waits up to GRACE_S seconds until no rank uses the copy of this run.
    """
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(ShardlabError):  # if the copies cannot be removed, the next run on this node removes them
        if run_dir.read_run().data_stage != "node":
            return
        while node_folder.make_shared_folder_name(run_dir.path) in node_folder.remove_unused() and time.monotonic() < deadline:
            time.sleep(0.1)


def belongs_to_run(pid: int, run_dir: RunDir) -> bool:
    """Whether the process with this id belongs to the run in this folder. False if its environment cannot be read."""
    try:
        return psutil.Process(pid).environ().get(RUN_MARK_VARIABLE, "").partition("#")[0] == str(run_dir.path)
    except (psutil.Error, OSError):
        return False


class OomWatch:
    """Tells whether the kernel's OOM killer ended a process since this object was made."""

    def __init__(self) -> None:
        self._kills_before = count_oom_kills()

    def record_oom(self, run_dir: RunDir) -> None:
        """If the OOM killer ended a process of this job, record the event `oom`. If only the machine counts, of all its users,
        record the event OOM_ON_MACHINE."""
        (kill_count, counts_only_job), host_name = count_oom_kills(), gethostname()
        if kill_count <= self._kills_before[0]:
            return
        if counts_only_job:
            why = f"out of host memory: the kernel's OOM killer ended a process on {host_name} during the run"
        else:
            why = f"perhaps out of memory: the kernel ended a process on {host_name} during the run, perhaps of another job"
        run_dir.write_event(f"node-{host_name}", "oom" if counts_only_job else OOM_ON_MACHINE, why=why)


def count_oom_kills() -> tuple[int, bool]:
    """The number of processes that the kernel's OOM killer has ended because memory ran out, and whether only processes of this
    job were counted. If the job's cgroup has no counter, all processes of this machine since its boot count, of any user."""
    counter_paths = find_oom_counters(Path("/proc/self/cgroup").read_text())
    kill_count = 0
    for counter_path in counter_paths or [Path("/proc/vmstat")]:
        with contextlib.suppress(OSError):  # the cgroup of a step that has ended is removed
            kill_count += sum(
                int(line.split()[1]) for line in files.read(counter_path).decode().splitlines() if line.startswith("oom_kill ")
            )
    return kill_count, bool(counter_paths)


def find_oom_counters(cgroups_text: str, cgroup_root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """The files that count the processes of this job ended by the OOM killer; empty if its cgroup has no such file.

    In version 2, the file of a job includes the cgroups below it; in version 1, each cgroup counts only its own processes.
    cgroups_text: the text of /proc/self/cgroup. cgroup_root: the folder in which the cgroups are mounted.
    """
    for cgroup_line in cgroups_text.splitlines():
        _, controllers, cgroup_path = cgroup_line.split(":", 2)
        if (job_match := _JOB_CGROUP.match(cgroup_path)) is None:
            continue
        job_cgroup_path = job_match[0].lstrip("/")
        if controllers == "" and (events_path := cgroup_root / job_cgroup_path / "memory.events").exists():
            return [events_path]
        if "memory" in controllers.split(",") and (job_cgroup := cgroup_root / "memory" / job_cgroup_path).exists():
            return sorted(job_cgroup.rglob("memory.oom_control"))
    return []


def _is_marked(process: psutil.Process, run_mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(RUN_MARK_VARIABLE) == run_mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


# Asks the kernel to send SIGTERM to this process when its parent ends. Called in a new process before its program starts.
def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
