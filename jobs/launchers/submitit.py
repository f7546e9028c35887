"""submitit's processes, one a rank: as tasks of a job step on Slurm, as submitit's local executor starts them elsewhere.

    python -m jobs.launchers.submitit RUN_DIR       all ranks on this machine

What submitit's processes read is a pickle that holds the path of the run's folder; what they write as their result nobody
reads. Jobs are sent as those of every launcher, and what became of them stands in the run's own records.
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

from jobs import on_node
from jobs.launcher import Launcher
from jobs.meeting import master
from shardlab import console, files
from shardlab.errors import InputError
from shardlab.run import Run
from shardlab.rundir import RunDir

FOLDER = "log/submitit"
LOCAL = "SUBMITIT_LOCAL_"  # how variables begin in which its local executor tells a process its place
PLACEHOLDERS = ("%j", "%t", "%a", "%A")  # which submitit fills in, also in a path that has them by chance
SIGNAL_S = 60  # so long before it ends a job for another one, Slurm sends submitit's signal, where it is set up to
TELL_S = 0.5


def command(run: Run, python: str) -> list[str]:
    return [python, "-m", "jobs.launchers.submitit", "."]


def task(run: Run, python: str) -> list[str]:
    return [python, "-u", "-m", "submitit.core._submit", FOLDER]


def prepare(folder: RunDir, run: Run) -> dict[str, str]:
    """Write what submitit's processes read. Raises InputError, WorkspaceError."""
    from submitit.core.utils import DelayedSubmission, JobPaths
    from submitit.slurm.slurm import SlurmJobEnvironment

    if any(sign in str(folder.path) for sign in PLACEHOLDERS):
        signs = ", ".join(PLACEHOLDERS)
        raise InputError(f"{folder.path}: submitit puts a job's numbers for {signs}. Allowed: a workspace without them.")
    if run.scheduler == "slurm":
        job, environment = SlurmJobEnvironment().job_id, {"SUBMITIT_EXECUTOR": "slurm"}
    else:
        job = str(os.getpid())
        environment = {"SUBMITIT_EXECUTOR": "local", f"{LOCAL}JOB_ID": job}
    submission = DelayedSubmission(Rank(str(folder.path)))
    submission.set_timeout((run.limit_s or 0) // 60, run.requeues)
    shutil.rmtree(folder.path / FOLDER, ignore_errors=True)  # submitit stops at half a file of an earlier start
    files.make_folder(folder.path / FOLDER)
    files.write_atomic(JobPaths(folder.path / FOLDER, job).submitted_pickle, pickle.dumps(submission))
    return environment


class Rank:
    """What is called in each of submitit's processes: it has a process of its own for the rank, as a signal has to be answered
    while the rank is in the middle of a step."""

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
        rank = on_node.start([sys.executable, "-m", "trainers", "run", self.folder], None, environment)
        self.pid = rank.pid
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._forward)
        signal.signal(signal.SIGUSR2, before)
        if code := _code(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)):
            sys.exit(code)

    def checkpoint(self) -> NoReturn:
        """Have all ranks save, if they keep checkpoints, and end; end as this one did.

        submitit calls it on its signal in the process of rank 0, and would then have Slurm start the job again at once,
        before the records say how this start ended, and however often. So this does not return: the run's supervisor, which
        sees the ranks end, has it started again.
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
    """Start all ranks here as submitit's local executor would, which does not end the others where one failed, nor say so."""
    if len(argv) != 1:
        raise InputError("usage: python -m jobs.launchers.submitit RUN_DIR")
    run = RunDir(Path(argv[0]).absolute()).read_run()
    world = run.world.world_size
    everyone = {**os.environ, f"{LOCAL}NTASKS": str(world), f"{LOCAL}JOB_NUM_NODES": "1", f"{LOCAL}NODEID": "0"}
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        for one in started:
            if one.returncode is None:
                os.kill(one.pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, forward)
    for rank in range(world):
        place = {f"{LOCAL}GLOBALID": str(rank), f"{LOCAL}LOCALID": str(rank)}
        started.append(on_node.start(task(run, sys.executable), None, everyone | place))
    codes = [one.poll() for one in started]
    while None in codes and not any(codes):
        time.sleep(0.05)
        codes = [one.poll() for one in started]
    failed = next((code for code in codes if code), 0)
    forward(signal.SIGTERM, None)
    until = time.monotonic() + on_node.GRACE_S
    while any(one.poll() is None for one in started) and time.monotonic() < until:
        time.sleep(0.05)
    return 128 - failed if failed < 0 else failed


LAUNCHER = Launcher(
    name="submitit",
    summary="submitit's processes, one a rank: a task each on Slurm, as its local executor starts them elsewhere",
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
