"""The launcher `submitit`: starts one process of submitit for every rank.

    python -m jobs.launchers.submitit RUN_DIR       start all ranks on this machine

On Slurm, submitit's processes are the tasks of the run's job step. Without Slurm, this program starts submitit's processes. The
processes read a pickle file with the path of the run's folder. They also write pickle files with results, which shardlab does
not use: the run's own records say how the run ended. Jobs are submitted in the same way as for every other launcher, not by
submitit.
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

from jobs.launcher import Launcher, make_rank_argv
from jobs.node import node_processes
from jobs.node.rendezvous import read_master_variables
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console

SUBMITIT_FOLDER = "log/submitit"
LOCAL_PREFIX = "SUBMITIT_LOCAL_"  # prefix of the variables in which submitit's local executor gives a process its rank
# submitit replaces these words in every path, also if a folder has such a name by chance
PATH_PLACEHOLDERS = ("%j", "%t", "%a", "%A")
PREEMPTION_SIGNAL_S = 60  # seconds before a preemption at which Slurm sends submitit's signal, if it is configured so
SIGNAL_INTERVAL_S = 0.5  # seconds between two signals that ask a rank to save a checkpoint


def make_node_argv(run: Run, python: str) -> list[str]:
    """The argv that starts all ranks of a run on this machine. It runs this module, which starts the ranks in the same way as
    submitit's local executor."""
    return [python, "-m", "jobs.launchers.submitit", "."]


def make_task_argv(run: Run, python: str) -> list[str]:
    """The argv of the task of one rank in a Slurm job step."""
    return [python, "-u", "-m", "submitit.core._submit", SUBMITIT_FOLDER]


def prepare_start(run_dir: RunDir, run: Run) -> dict[str, str]:
    """Write the pickle file that submitit's processes read. Returns the environment variables that these processes need. Raises
    InputError and WorkspaceError."""
    from submitit.core.utils import DelayedSubmission, JobPaths
    from submitit.slurm.slurm import SlurmJobEnvironment

    if any(placeholder in str(run_dir.path) for placeholder in PATH_PLACEHOLDERS):
        placeholders_text = ", ".join(PATH_PLACEHOLDERS)
        raise InputError(
            f"{run_dir.path}: submitit replaces {placeholders_text} in paths by job numbers. Allowed: a path without them."
        )
    if run.scheduler in ("slurm", "allocation"):
        job_id, environment = SlurmJobEnvironment().job_id, {"SUBMITIT_EXECUTOR": "slurm"}
    else:
        job_id = str(os.getpid())
        environment = {"SUBMITIT_EXECUTOR": "local", f"{LOCAL_PREFIX}JOB_ID": job_id}
    submission = DelayedSubmission(RankTask(str(run_dir.path)))
    submission.set_timeout((run.limit_s or 0) // 60, run.find_retry_limit("timeout"))
    # submitit fails on an incomplete file of an earlier start
    shutil.rmtree(run_dir.path / SUBMITIT_FOLDER, ignore_errors=True)
    files.make_folder(run_dir.path / SUBMITIT_FOLDER)
    files.write_atomic(JobPaths(run_dir.path / SUBMITIT_FOLDER, job_id).submitted_pickle, pickle.dumps(submission))
    return environment


class RankTask:
    """The object that submitit calls in each of its processes. It starts the rank as a child process, so that submitit's
    process can handle signals while the rank computes a step."""

    def __init__(self, run_folder: str) -> None:
        self.run_folder = run_folder

    def __call__(self) -> None:
        import submitit

        job_environment = submitit.JobEnvironment()
        environment = {
            **os.environ,
            **read_master_variables(),
            "RANK": str(job_environment.global_rank),
            "LOCAL_RANK": str(job_environment.local_rank),
            "WORLD_SIZE": str(job_environment.num_tasks),
            "LOCAL_WORLD_SIZE": str(job_environment.num_tasks // job_environment.num_nodes),
        }
        # the rank inherits that SIGUSR2 is ignored, because Slurm sends SIGUSR2 to every process of the job step
        previous_handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        # the rank inherits this too, and ignores SIGUSR1 until it can save a checkpoint
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        rank_process = node_processes.start_process(
            [sys.executable, *make_rank_argv(RunDir(Path(self.run_folder)).read_run())], None, environment
        )
        self.pid = rank_process.pid
        for signal_number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signal_number, self._forward_signal)
        signal.signal(signal.SIGUSR2, previous_handler)
        if exit_code := _compute_exit_code(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)):
            sys.exit(exit_code)

    def checkpoint(self) -> NoReturn:
        """Ask the ranks to save a checkpoint, if the cell keeps checkpoints, and wait until they end; then exit with the exit
        code of this rank.

        submitit calls this method in the process of rank 0 when submitit's signal arrives. The method never returns. If it
        returned, submitit would requeue the job at once, before the records of the run say how this start ended, and any number
        of times. Instead, the supervisor of the run sees that the ranks have ended, and requeues the job.
        """
        keeps_checkpoints = RunDir(Path(self.run_folder)).read_run().cell.instruments.checkpoints is not None
        while (exit_status := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
            if keeps_checkpoints:
                os.kill(self.pid, signal.SIGUSR1)
            time.sleep(SIGNAL_INTERVAL_S)
        sys.exit(_compute_exit_code(exit_status))

    def _forward_signal(self, signal_number: int, _frame: FrameType | None) -> None:
        os.kill(self.pid, signal_number)


def _compute_exit_code(exit_status: os.waitid_result | None) -> int:
    """The exit code of a process that has ended; 128 + N if signal N ended the process, as in a shell."""
    assert exit_status is not None
    return exit_status.si_status if exit_status.si_code == os.CLD_EXITED else 128 + exit_status.si_status


def main(argv: list[str]) -> int:
    """Start all ranks on this machine, as submitit's local executor does, and wait for their end; return the exit code.

    If a rank fails, this function ends the other ranks and returns the exit code of the failed rank; submitit's local executor
    does neither. argv: RUN_DIR.
    """
    if len(argv) != 1:
        raise InputError("usage: python -m jobs.launchers.submitit RUN_DIR")
    run = RunDir(Path(argv[0]).absolute()).read_run()
    world_size = run.world.world_size
    environment = {
        **os.environ,
        f"{LOCAL_PREFIX}NTASKS": str(world_size),
        f"{LOCAL_PREFIX}JOB_NUM_NODES": "1",
        f"{LOCAL_PREFIX}NODEID": "0",
    }
    processes: list[subprocess.Popen[bytes]] = []

    def forward_signal(signal_number: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.returncode is None:
                os.kill(process.pid, signal_number)

    for signal_number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(signal_number, forward_signal)
    for rank in range(world_size):
        variables = {f"{LOCAL_PREFIX}GLOBALID": str(rank), f"{LOCAL_PREFIX}LOCALID": str(rank)}
        processes.append(node_processes.start_process(make_task_argv(run, sys.executable), None, environment | variables))
    exit_codes = [process.poll() for process in processes]
    while None in exit_codes and not any(exit_codes):
        time.sleep(0.05)
        exit_codes = [process.poll() for process in processes]
    failed_exit_code = next((exit_code for exit_code in exit_codes if exit_code), 0)
    forward_signal(signal.SIGTERM, None)
    kill_deadline_s = time.monotonic() + node_processes.GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < kill_deadline_s:
        time.sleep(0.05)
    return 128 - failed_exit_code if failed_exit_code < 0 else failed_exit_code


LAUNCHER = Launcher(
    name="submitit",
    summary="submitit: a process of submitit's for every rank, on Slurm as a task, on one machine like its local executor",
    several_nodes=True,
    make_node_argv=make_node_argv,
    make_task_argv=make_task_argv,
    has_rank_tasks=True,
    prepare=prepare_start,
    sbatch_options=(f"signal=USR2@{PREEMPTION_SIGNAL_S}",),
)

if __name__ == "__main__":
    sys.exit(console.run_command(lambda: main(sys.argv[1:])))
