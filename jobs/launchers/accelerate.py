"""The launcher `accelerate`, for commands of a user: Hugging Face's launcher, with its options from `launcher_options`.

    python -m jobs.launchers.accelerate RUN_DIR

This program replaces itself by accelerate's launcher, on each node of the run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from jobs.launcher import Launcher, list_launcher_options, make_rank_argv
from jobs.node.rendezvous import read_master_variables, read_node_number
from shardlab.errors import InputError
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console


def make_node_argv(run: Run, python: str) -> list[str]:
    """The argv that starts all ranks of a run on this node."""
    return [python, "-m", "jobs.launchers.accelerate", "."]


def main(argv: list[str]) -> NoReturn:
    """Replace this process (execve) by accelerate's launcher. argv: RUN_DIR. Raises InputError."""
    if len(argv) != 1:
        raise InputError("usage: python -m jobs.launchers.accelerate RUN_DIR")
    run_dir = RunDir(Path(argv[0]).absolute())
    run, master_variables = run_dir.read_run(), read_master_variables()
    launcher_argv = [
        sys.executable, "-m", "accelerate.commands.launch",
        f"--num_processes={run.world.world_size}",
        f"--num_machines={run.world.nnodes}",
        f"--machine_rank={read_node_number(os.environ)}",
        f"--main_process_ip={master_variables['MASTER_ADDR']}",
        f"--main_process_port={master_variables['MASTER_PORT']}",
        *_list_kind_options(run), *list_launcher_options(run), "--no_python", sys.executable, *make_rank_argv(run),
    ]  # fmt: skip
    # files that the options name are in the folder of the command
    os.chdir(run_dir.work)
    os.execve(sys.executable, [*launcher_argv[:-1], str(run_dir.path)], dict(os.environ))


def _list_kind_options(run: Run) -> list[str]:
    """The option that lets accelerate start several ranks, unless the options of the command say how. Without it, accelerate
    starts one process that trains alone if a node has at most one GPU."""
    option_words = [word.replace("-", "_") for word in list_launcher_options(run)]
    states_kind = any(word.startswith(("__config_file", "__use_", "__multi_gpu", "__cpu")) for word in option_words)
    return [] if states_kind or run.world.world_size == 1 else ["--multi_gpu"]


LAUNCHER = Launcher(
    name="accelerate",
    summary="for a command of your own: accelerate's launcher, which reads an FSDP or DeepSpeed configuration",
    several_nodes=True,
    make_node_argv=make_node_argv,
    make_task_argv=make_node_argv,
    takes_options=True,
    starts_trainings=False,
)

if __name__ == "__main__":
    sys.exit(console.run_command(lambda: main(sys.argv[1:])))
