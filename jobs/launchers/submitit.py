"""The launcher `submitit`: one of submitit's processes for every rank, as a task of the job step on Slurm, else started by us.

    python -m jobs.launchers.submitit RUN_DIR       all ranks on this machine

submitit's processes read a pickle that holds the path of the run's folder. Nobody reads the result pickles that they write.
Jobs are submitted as for every launcher, and the run's own records say how they ended.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from jobs import node_processes
from jobs.launcher import Launcher
from jobs.rendezvous import master
from shardlab import console, files
from shardlab.errors import InputError
from shardlab.run import Run
from shardlab.rundir import RunDir

FOLDER = "log/submitit"
LOCAL = "SUBMITIT_LOCAL_"  # prefix of the variables in which its local executor gives a process its rank
PLACEHOLDERS = ("%j", "%t", "%a", "%A")  # submitit replaces them in paths, even if they are there by chance
SIGNAL_S = 60  # seconds before a preemption at which Slurm sends submitit's signal, if Slurm is configured to
TELL_S = 0.5


def command(run: Run, python: str) -> list[str]:
    """The words that start all ranks of a run on this node: this file, which starts each of them as submitit does."""
    return [python, "-m", "jobs.launchers.submitit", "."]


def task(run: Run, python: str) -> list[str]:
    """The words of one rank in a job step of Slurm."""
    return [python, "-u", "-m", "submitit.core._submit", FOLDER]


def prepare(folder: RunDir, run: Run) -> dict[str, str]:
    """Write what submitit's processes read. Raises InputError, WorkspaceError."""
    from submitit.core.utils import DelayedSubmission, JobPaths
    from submitit.slurm.slurm import SlurmJobEnvironment

    if any(sign in str(folder.path) for sign in PLACEHOLDERS):
        signs = ", ".join(PLACEHOLDERS)
        raise InputError(f"{folder.path}: submitit replaces {signs} in paths by job numbers. Allowed: a path without them.")
    if run.scheduler in ("slurm", "allocation"):
        job, environment = SlurmJobEnvironment().job_id, {"SUBMITIT_EXECUTOR": "slurm"}
    else:
        job = str(os.getpid())
        environment = {"SUBMITIT_EXECUTOR": "local", f"{LOCAL}JOB_ID": job}
    submission = DelayedSubmission(RankTask(str(folder.path)))
    submission.set_timeout((run.limit_s or 0) // 60, run.requeues)
    shutil.rmtree(folder.path / FOLDER, ignore_errors=True)  # submitit fails on an incomplete file of an earlier start
    files.make_folder(folder.path / FOLDER)
    files.write_atomic(JobPaths(folder.path / FOLDER, job).submitted_pickle, pickle.dumps(submission))
    return environment


class RankTask:
    """Called in each of submitit's processes. It starts the rank as another process, because a signal has to be handled while
    the rank is in the middle of a step."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self) -> None:
        import submitit

        place = submitit.JobEnvironment()
        environment = {
            **os.environ,
            **master(),
            "RANK": str(place.global_rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(place.num_tasks),
            "LOCAL_WORLD_SIZE": str(place.num_tasks // place.num_nodes),
        }
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it to every process of the step
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the rank knows how to save
        rank = node_processes.start([sys.executable, "-m", "trainers", "run", self.folder], None, environment)
        self.pid = rank.pid
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._forward)
        signal.signal(signal.SIGUSR2, before)
        if code := _code(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)):
            sys.exit(code)

    def checkpoint(self) -> NoReturn:
        """Let all ranks save a checkpoint, if the cell has checkpoints, and end; then exit with the exit code of this rank.

        submitit calls this in the process of rank 0 on its signal. If it returned, submitit would requeue the job at once,
        before the records say how this start ended, and without a limit. So it does not return: the run's supervisor sees the
        ranks end and requeues the job.
        """
        saves = RunDir(Path(self.folder)).read_run().cell.instruments.checkpoints is not None
        while (ended := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
            if saves:
                os.kill(self.pid, signal.SIGUSR1)
            time.sleep(TELL_S)
        sys.exit(_code(ended))

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        os.kill(self.pid, number)


def _code(ended: os.waitid_result | None) -> int:
    """An exit code; a signal's number comes as 128 + number, as in a shell."""
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status


def main(argv: list[str]) -> int:
    """Start all ranks here like submitit's local executor, but end the other ranks and report it if a rank fails."""
    if len(argv) != 1:
        raise InputError("usage: python -m jobs.launchers.submitit RUN_DIR")
    run = RunDir(Path(argv[0]).absolute()).read_run()
    world = run.world.world_size
    everyone = {**os.environ, f"{LOCAL}NTASKS": str(world), f"{LOCAL}JOB_NUM_NODES": "1", f"{LOCAL}NODEID": "0"}
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        for process in started:
            if process.returncode is None:
                os.kill(process.pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, forward)
    for rank in range(world):
        place = {f"{LOCAL}GLOBALID": str(rank), f"{LOCAL}LOCALID": str(rank)}
        started.append(node_processes.start(task(run, sys.executable), None, everyone | place))
    codes = [process.poll() for process in started]
    while None in codes and not any(codes):
        time.sleep(0.05)
        codes = [process.poll() for process in started]
    failed = next((code for code in codes if code), 0)
    forward(signal.SIGTERM, None)
    until = time.monotonic() + node_processes.GRACE_S
    while any(process.poll() is None for process in started) and time.monotonic() < until:
        time.sleep(0.05)
    return 128 - failed if failed < 0 else failed


LAUNCHER = Launcher(
    name="submitit",
    summary="submitit: a process of submitit's for every rank, on Slurm as a task, on one machine like its local executor",
    rehearsal=False,
    several_nodes=True,
    command=command,
    task=task,
    per_rank=True,
    prepare=prepare,
    sbatch=(f"signal=USR2@{SIGNAL_S}",),
)

if __name__ == "__main__":
    sys.exit(console.run(lambda: main(sys.argv[1:])))
