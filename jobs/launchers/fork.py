"""The launcher `fork`, for rehearsals on a CPU: forks the ranks from a process that has already imported torch. So ranks need
not import torch, and a run takes seconds."""

from __future__ import annotations

from jobs.launcher import Launcher
from shardlab.runs.run import Run


def make_node_argv(run: Run, python: str) -> list[str]:
    """The argv that starts all ranks of a run on this node."""
    return [python, "-m", "trainers", "fork", "."]


LAUNCHER = Launcher(
    name="fork",
    summary="rehearsal on CPU: ranks are forked from one process that has imported everything, so a run takes about a second",
    on_gpus=False,
    starts_commands=False,
    several_nodes=False,
    make_node_argv=make_node_argv,
    make_task_argv=make_node_argv,
)
