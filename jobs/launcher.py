"""The interface of a launcher (torchrun, deepspeed, ...): its properties, and the command lines that it builds for a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec

from shardlab import registry
from shardlab.errors import UnknownName
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.runs.trace_part import TRACE_STRATEGY


def make_rank_argv(run: Run) -> list[str]:
    """The words behind the Python interpreter that start one rank, in the run's folder."""
    return ["-m", "trainers", "run", "."] if run.cell.command is None else ["-m", "jobs.node.command_rank", "."]


def list_launcher_options(run: Run) -> list[str]:
    """The further words for the launcher that a command of the user asks for."""
    return run.cell.command.launcher_options if run.cell.command is not None else []


def _prepare_nothing(_run_dir: RunDir, _run: Run) -> dict[str, str]:
    return {}


class Launcher(msgspec.Struct, frozen=True):
    """A launcher: a program that starts the ranks of a run."""

    name: str
    """The name, which `jobs launchers` prints."""
    summary: str
    """A description of one line, which `jobs launchers` prints."""
    several_nodes: bool
    """Whether the launcher can start ranks on more than one node."""
    make_node_argv: Callable[[Run, str], list[str]]
    """Builds the argv that starts all ranks of a run on this node, from the run and the path of the Python interpreter. The
    command is executed in the run's folder."""
    make_task_argv: Callable[[Run, str], list[str]]
    """Builds the argv of one task of a job step, from the same arguments. The words of the argv may contain variables such as
    $SHARDLAB_ADDRESS, which jobs.supervisor.step_task replaces on the node."""
    has_rank_tasks: bool = False
    """Whether a job step has one task for each rank; otherwise a job step has one task for each node."""
    prepare: Callable[[RunDir, Run], dict[str, str]] = _prepare_nothing
    """Writes the files that a start of the run needs into the run's folder, on the job's first node. Returns variables for the
    environment of all ranks."""
    sbatch_options: tuple[str, ...] = ()
    """Additional options for the run's sbatch script, in long form without the dashes."""
    needed_programs: tuple[str, ...] = ()
    """The programs that must be on the PATH of each node, besides Python and Slurm."""
    on_gpus: bool = True
    """Whether the ranks may compute on GPUs; if not, a run needs no GPUs, and is a rehearsal if it trains."""
    starts_commands: bool = True
    """Whether the ranks may be those of a command of the user."""
    takes_options: bool = False
    """Whether the launcher gets the words of `launcher_options` of a command."""
    starts_trainings: bool = True
    """Whether the ranks may be those of a training by shardlab."""

    def make_srun_argv(
        self, run: Run, python: str, *, overlap: bool = False, container_options: Sequence[str] = ()
    ) -> list[str]:
        """The argv that starts all ranks inside a Slurm job, as one job step. If one task fails, Slurm ends the whole step.

        python: the Python interpreter of the ranks. overlap: whether the step may use processors and GPUs that another
        step of the job holds, such as the shell of an allocation. container_options: the options of srun that start each task
        in a container."""
        tasks_per_node = run.world.nproc_per_node if self.has_rank_tasks else 1
        argv = [
            "srun", f"--nodes={run.world.nnodes}", f"--ntasks-per-node={tasks_per_node}", "--kill-on-bad-exit=1",
            "--cpu-bind=none", "--unbuffered",
        ]  # fmt: skip
        if overlap:
            argv.append("--overlap")
        if self.has_rank_tasks:
            argv.append("--distribution=block")  # consecutive ranks are on the same node, as with the other launchers
        task_argv = self.make_task_argv(run, python)
        return [*argv, *container_options, python, "-m", "jobs.supervisor.step_task", ".", "--", *task_argv]


def _make_trace_argv(_run: Run, python: str) -> list[str]:
    return [python, "-P", "-m", "collect.traces.part", "."]


# The launcher of runs that analyse traces. It starts no ranks, so no menu lists it, and a matrix cannot name it.
_TRACE_LAUNCHER = Launcher(
    name=TRACE_STRATEGY,
    summary="analyses the profiler traces of a part of a folder (jobs trace)",
    several_nodes=False,
    make_node_argv=_make_trace_argv,
    make_task_argv=_make_trace_argv,
    on_gpus=False,
)


@functools.cache
def load_launchers() -> dict[str, Launcher]:
    """All launchers, by their names."""
    return {
        launcher_module.LAUNCHER.name: launcher_module.LAUNCHER for launcher_module in registry.load_plugins("jobs.launchers")
    }


def find_launcher(launcher_name: str) -> Launcher:
    """The launcher with this name. If no launcher has the name, raises UnknownName, which lists all launchers."""
    launcher_by_name = load_launchers()
    if launcher_name == TRACE_STRATEGY:
        return _TRACE_LAUNCHER
    if launcher_name not in launcher_by_name:
        raise UnknownName("launcher", launcher_name, launcher_by_name)
    return launcher_by_name[launcher_name]
