"""The launcher `srun`, for commands of a user: Slurm starts a task for each rank, and no other program lies between."""

from __future__ import annotations

from jobs.launcher import Launcher, make_rank_argv
from shardlab.runs.run import Run


def make_node_argv(run: Run, python: str) -> list[str]:
    """The argv of the task of one rank. It gives the rank the variables of torch's `env://` method."""
    return [python, *make_rank_argv(run)]


LAUNCHER = Launcher(
    name="srun",
    summary="for a command of your own: a task of Slurm for each rank, which finds its number in Slurm's or torch's variables",
    several_nodes=True,
    make_node_argv=make_node_argv,
    make_task_argv=make_node_argv,
    has_rank_tasks=True,
    needed_programs=("srun",),
    starts_trainings=False,
)
