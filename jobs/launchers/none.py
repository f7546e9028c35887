"""The launcher `none`, for commands of a user that start their own ranks: starts the command once on each node of the run."""

from __future__ import annotations

from jobs.launcher import Launcher, make_rank_argv
from shardlab.runs.run import Run


def make_node_argv(run: Run, python: str) -> list[str]:
    """The argv that starts the command on this node."""
    return [python, *make_rank_argv(run)]


LAUNCHER = Launcher(
    name="none",
    summary="for a command of your own that starts its ranks itself: one process on each node",
    several_nodes=True,
    make_node_argv=make_node_argv,
    make_task_argv=make_node_argv,
    starts_trainings=False,
)
