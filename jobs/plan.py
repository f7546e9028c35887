"""Plans a matrix on a cluster, before anything is written: its cells, its runs, the cells that do not fit, and remarks."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from jobs import render, tiny
from jobs import repeats as number_of_runs
from jobs.launcher import launcher
from jobs.reconcile import Status, not_replaceable
from jobs.repeats import Cost
from jobs.resolve import Machine, Misfit, misfits, resolve
from jobs.select import condition, holds
from shardlab import cluster, host, matrix
from shardlab.cell import Cell
from shardlab.cluster import Cluster
from shardlab.errors import InputError, MissingExtra
from shardlab.matrix import Matrix
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace
from trainers import menu

SCALES = ("full", "tiny")


class Plan(msgspec.Struct, frozen=True):
    """A matrix resolved on a cluster: `cells` are the cells that --where selects, `all_cells` all cells of the matrix.

    repeats: the number of runs of each of `all_cells`, by its name. cost: the time of `cells`, as far as it is known.
    misfits: the `cells` that do not fit the machines of the cluster, each with its place in the file. advice: sentences that
    name the options with which all cells fit.
    """

    matrix: Matrix
    all_cells: list[Cell]
    cells: list[Cell]
    repeats: dict[str, int]
    cost: Cost
    source: render.Source
    remarks: list[str]
    misfits: list[Misfit]
    advice: list[str]


def of(
    workspace: Workspace,
    name: str,
    *,
    cluster_file: str | None,
    where: str | None,
    repeats: int | None,
    scale: str = "full",
    wait_gpus_s: int = 0,
) -> Plan:
    """Read, check and resolve a matrix. --where tests the cells of the file, even if their tiny twins run. wait_gpus_s: as in
    `Run`.

    Raises InputError; nothing is written.
    """
    if repeats is not None and not 1 <= repeats <= 1000:
        raise InputError(f"--repeats: found {repeats}. Allowed: 1 to 1000.")
    asked = matrix.load(matrix.find(name))
    where_runs = cluster.find(Path(cluster_file) if cluster_file else None, workspace.path)
    if where_runs.provider != "local" and where_runs.slurm is None:
        raise InputError(
            f"the cluster {where_runs.name}: the cluster file has no `slurm`; without Slurm, runs start only on this machine. "
            "Allowed: a cluster file with `slurm`, a cluster file with `provider: local`, or no cluster file."
        )
    machine = _machine(where_runs)
    cells = resolve(asked, per_node=machine.gpus if where_runs.slurm else None)
    if scale == "tiny":
        cells = tiny.twins(cells, menu.workloads())
        tiny.must_train(cells)
    chosen = [cell for cell in cells if where is None or holds(condition(where), cell)]
    if not chosen:
        raise InputError(f"--where {where!r} selects none of the {len(cells)} cells.")
    unheld = misfits(asked, cells, machine, chosen)
    runs_as = asked.name if scale == "full" else f"{asked.name}-{scale}"
    source = render.source(runs_as, where_runs, workspace, wait_gpus_s=wait_gpus_s)
    counts = number_of_runs.of(asked.file, cells, repeats)
    return Plan(
        matrix=asked,
        all_cells=cells,
        cells=chosen,
        repeats=counts,
        cost=number_of_runs.cost(workspace, chosen, counts),
        source=source,
        remarks=[*_remarks(chosen, machine, where_runs), *render.remarks(source)],
        misfits=unheld,
        advice=advice(asked, cells, chosen, machine, where) if unheld else [],
    )


def _machine(where: Cluster) -> Machine:
    if where.slurm is not None:
        return Machine(nodes=len(where.with_role("worker")), gpus=where.gpus.per_node or None if where.gpus else None)
    here = host.observe()
    return Machine(nodes=1, gpus=len(here.gpus) if here.gpus else None, here=True)


def must_fit(plan: Plan) -> None:
    """Raises InputError that lists every selected cell that does not fit the cluster, and the options that leave them out."""
    if plan.misfits:
        problems = plan.matrix.document.errors([one.problem for one in plan.misfits])
        raise InputError("\n".join([str(problems), *plan.advice]))


def advice(asked: Matrix, cells: Sequence[Cell], chosen: Sequence[Cell], machine: Machine, where: str | None) -> list[str]:
    """Options with which all cells fit: an expression for --where that selects exactly the cells that fit, and --scale tiny.

    cells: all cells of the matrix. chosen: the cells that `where` selects.
    """
    unheld = {one.cell for one in misfits(asked, cells, machine, chosen)}
    fitting = [cell for cell in chosen if cell.name() not in unheld]
    found = []
    leaves = {one: [cell for cell in chosen if holds(condition(one), cell)] for one in _limits(machine)}
    expression = next((one for one, cells_left in leaves.items() if cells_left == fitting), None)
    if fitting and expression:
        both = f"({where}) and {expression}" if where else expression
        quoted = shlex.quote(both) if set(both) & set('"$`\\!') else f'"{both}"'
        found.append(f"{len(fitting)} of {len(chosen)} cells fit this cluster: --where {quoted} leaves only those.")
    with contextlib.suppress(InputError):  # a workload without a twin
        if chosen[0].rehearses is None and not misfits(asked, (twins := tiny.twins(cells, menu.workloads())), machine, twins):
            found.append("--scale tiny rehearses every cell at a tiny size, with its ranks on the CPU of one machine.")
    return found


def _limits(machine: Machine) -> list[str]:
    """Expressions that are true for cells that fit the machines, the simplest first."""
    nodes = "nnodes == 1" if machine.nodes == 1 else f"nnodes <= {machine.nodes}"
    if machine.gpus is None:
        return [nodes]
    gpus = [f"gpus <= {machine.gpus}", f"gpus <= {machine.gpus} * nnodes"]
    gpus.append(f"(launcher == 'fork' or {gpus[-1]})")
    return [nodes, *gpus, *(f"{nodes} and {one}" for one in gpus)]


def must_train_here(source: render.Source) -> None:
    """Raises MissingExtra if the runs are to start on this machine and torch is not installed on it."""
    if source.scheduler == "local" and find_spec("torch") is None:
        raise MissingExtra("trainers", "training on this machine", "torch")


class Rendering(msgspec.Struct, frozen=True):
    """What `jobs render` did. folders: those that were written. set_aside: runs whose folders were left as they are, because
    their records do not tell whether they were sent."""

    folders: list[RunDir]
    set_aside: list[Status]


def render_all(plan: Plan, runs: Path) -> Rendering:
    """Write the run folders of every repeat of every cell, below `runs`. The folder of a run that was sent stays as it is."""
    folders, set_aside = [], []
    for cell, repeat in number_of_runs.rounds(plan.cells, plan.repeats):
        run = render.run_of(cell, repeat, 1, plan.source)
        existing = RunDir(runs / run.run_id)
        if existing.path.exists():
            if (kept := not_replaceable(existing)) is not None:
                set_aside.append(kept)
                continue
            if existing.judge().state != "planned":
                continue
        folders.append(render.write(run, runs, plan.source))
    return Rendering(folders, set_aside)


def _remarks(cells: Sequence[Cell], machine: Machine, where: Cluster) -> list[str]:
    remarks = tiny.dropped([cell.rehearses for cell in cells if cell.rehearses])
    processors = len(os.sched_getaffinity(0))
    most = max(cell.gpus for cell in cells)
    if where.slurm is not None:
        for name in sorted({cell.launcher for cell in cells if launcher(cell.launcher).needs}):
            programs = " and ".join(launcher(name).needs)
            remarks.append(f"the launcher {name} needs {programs} on each node; `jobs plan` cannot check the nodes.")
    if where.provider == "virtual":
        remarks.append("practice nodes: their GPUs exist only in Slurm; every rank is a process on this machine's CPU.")
    elif where.slurm is None and machine.gpus is None:
        remarks.append("no GPU here: every rank is a process on the CPU.")
        if most > processors:
            remarks.append(f"up to {most} ranks share {processors} processors: the measured times say little.")
    if where.slurm is None and find_spec("torch") is None:
        remarks.append("torch is not installed here: pip install 'shardlab[trainers]' before `jobs submit` on this machine.")
    if any(cell.rehearses for cell in cells):
        remarks.append("every cell is a rehearsal at scale tiny: it tests that everything works, not the speed.")
    elif any(cell.launcher == "fork" for cell in cells):
        remarks.append("cells with the launcher fork are a rehearsal: they test that everything works, not the speed.")
    return remarks
