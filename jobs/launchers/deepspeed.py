"""The launcher `deepspeed`: starts, on each node, the process deepspeed.launcher.launch, which starts the ranks of the node.

    python -m jobs.launchers.deepspeed RUN_DIR

The command `deepspeed` is not used. It would start deepspeed.launcher.launch over SSH or, with --no_ssh, on its own node. But
srun or jobs.ssh.step has started this program on every node already. And if `deepspeed` were the parent process, it would not
forward SIGTERM, and it would not report that a signal ended deepspeed.launcher.launch.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from jobs.launcher import Launcher, list_launcher_options, make_rank_argv
from jobs.node.rendezvous import read_master_variables, read_node_number
from shardlab.errors import InputError
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


def make_node_argv(run: Run, python: str) -> list[str]:
    """The argv that starts all ranks of a run on this node: this module, which replaces itself by DeepSpeed's launcher."""
    return [python, "-m", "jobs.launchers.deepspeed", "."]


def main(argv: list[str]) -> NoReturn:
    """Replace this process (execve) by DeepSpeed's launcher. argv: RUN_DIR. Raises InputError."""
    if len(argv) != 1:
        raise InputError("usage: python -m jobs.launchers.deepspeed RUN_DIR")
    run = RunDir(Path(argv[0]).absolute()).read_run()
    world = run.world
    local_ranks_by_node = {str(node): list(range(world.nproc_per_node)) for node in range(world.nnodes)}
    master_variables = read_master_variables()
    # DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES of the ranks to 0,...,n-1, even if Slurm or the user set another value. So
    # each rank is started through the command `env`, which restores the original value.
    visible_gpus = f"{GPUS_VARIABLE}={os.environ[GPUS_VARIABLE]}" if GPUS_VARIABLE in os.environ else f"--unset={GPUS_VARIABLE}"
    launcher_argv = [
        sys.executable, "-m", "deepspeed.launcher.launch",
        f"--world_info={base64.urlsafe_b64encode(msgspec.json.encode(local_ranks_by_node)).decode()}",
        f"--node_rank={read_node_number(os.environ)}",
        f"--master_addr={master_variables['MASTER_ADDR']}",
        f"--master_port={master_variables['MASTER_PORT']}",
        "--log_level=warning",
        "--no_local_rank",  # no argument --local_rank: ranks read their local rank from the environment
        "--no_python",
        *list_launcher_options(run), "env", visible_gpus, sys.executable, *make_rank_argv(run),
    ]  # fmt: skip
    os.execve(sys.executable, launcher_argv, {**os.environ, "LOCAL_WORLD_SIZE": str(world.nproc_per_node)})


LAUNCHER = Launcher(
    name="deepspeed",
    summary="DeepSpeed's launcher: a new process for every rank, rendezvous at a port of the first node",
    several_nodes=True,
    make_node_argv=make_node_argv,
    make_task_argv=make_node_argv,
    takes_options=True,
)

if __name__ == "__main__":
    sys.exit(console.run_command(lambda: main(sys.argv[1:])))
