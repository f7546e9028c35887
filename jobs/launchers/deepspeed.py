"""The launcher `deepspeed`: on each node, starts the process that `deepspeed` itself would start there; it starts the ranks.

    python -m jobs.launchers.deepspeed RUN_DIR

The command `deepspeed` reaches the nodes over SSH or, with --no_ssh, becomes this process on its own node. srun has started us
on every node already, and `deepspeed` as a parent would neither forward SIGTERM nor report a launcher that a signal ended.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from jobs.launcher import Launcher
from jobs.rendezvous import master, node_number
from shardlab import console
from shardlab.errors import InputError
from shardlab.run import Run
from shardlab.rundir import RunDir

GPUS = "CUDA_VISIBLE_DEVICES"


def command(run: Run, python: str) -> list[str]:
    """The words that start all ranks of a run on this node: this file, which becomes the launcher of DeepSpeed."""
    return [python, "-m", "jobs.launchers.deepspeed", "."]


def main(argv: list[str]) -> NoReturn:
    """Replace this process by the launcher of DeepSpeed. argv: RUN_DIR. Raises InputError."""
    if len(argv) != 1:
        raise InputError("usage: python -m jobs.launchers.deepspeed RUN_DIR")
    world = RunDir(Path(argv[0]).absolute()).read_run().world
    slots = {str(node): list(range(world.nproc_per_node)) for node in range(world.nnodes)}
    meeting = master()
    # It shows the ranks the GPUs 0 to n - 1, whatever Slurm or the user set. `env` restores the original value for the ranks.
    given = f"{GPUS}={os.environ[GPUS]}" if GPUS in os.environ else f"--unset={GPUS}"
    words = [
        sys.executable, "-m", "deepspeed.launcher.launch",
        f"--world_info={base64.urlsafe_b64encode(msgspec.json.encode(slots)).decode()}",
        f"--node_rank={node_number(os.environ)}",
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
    summary="DeepSpeed's launcher: a new process for every rank, rendezvous at a port of the first node",
    rehearsal=False,
    several_nodes=True,
    command=command,
    task=command,
)

if __name__ == "__main__":
    sys.exit(console.run(lambda: main(sys.argv[1:])))
