"""DeepSpeed's launcher: on each node the process that `deepspeed` itself starts there, which starts the ranks.

    python -m jobs.launchers.deepspeed RUN_DIR

The command `deepspeed` goes to the nodes over SSH or, with --no_ssh, becomes this process on its own node. srun has gone there
already, and `deepspeed` as a parent would not hand SIGTERM on, nor tell of a launcher that a signal ended.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from jobs.launcher import Launcher
from jobs.meeting import master
from shardlab import console
from shardlab.errors import InputError
from shardlab.run import Run
from shardlab.rundir import RunDir

GPUS = "CUDA_VISIBLE_DEVICES"


def command(run: Run, python: str) -> list[str]:
    return [python, "-m", "jobs.launchers.deepspeed", "."]


def main(argv: list[str]) -> NoReturn:
    if len(argv) != 1:
        raise InputError("usage: python -m jobs.launchers.deepspeed RUN_DIR")
    world = RunDir(Path(argv[0]).absolute()).read_run().world
    slots = {str(node): list(range(world.nproc_per_node)) for node in range(world.nnodes)}
    meeting = master()
    # It would show the ranks GPUs 0 to n - 1, whatever Slurm or a person gave; what was given is put back.
    given = f"{GPUS}={os.environ[GPUS]}" if GPUS in os.environ else f"--unset={GPUS}"
    words = [
        sys.executable, "-m", "deepspeed.launcher.launch",
        f"--world_info={base64.urlsafe_b64encode(msgspec.json.encode(slots)).decode()}",
        f"--node_rank={os.environ.get('SLURM_NODEID', '0')}",
        f"--master_addr={meeting['MASTER_ADDR']}",
        f"--master_port={meeting['MASTER_PORT']}",
        "--log_level=warning",
        "--no_local_rank",  # ranks read it in their environment
        "--no_python",
        "env", given, sys.executable, "-m", "trainers", "run", ".",
    ]  # fmt: skip
    os.execve(sys.executable, words, {**os.environ, "LOCAL_WORLD_SIZE": str(world.nproc_per_node)})


LAUNCHER = Launcher(
    name="deepspeed",
    summary="DeepSpeed's launcher: a new process for every rank, which meet at the first one's port",
    rehearsal=False,
    several_nodes=True,
    command=command,
    task=command,
)

if __name__ == "__main__":
    sys.exit(console.run(lambda: main(sys.argv[1:])))
