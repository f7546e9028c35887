"""What a matrix comes to on a cluster, before anything is written: cells, exclusions, and what to keep in mind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jobs import render, tiny
from jobs.launcher import launcher
from jobs.resolve import Machine, Misfit, misfits, resolve
from jobs.select import condition, holds
from shardlab import cluster, host, matrix
from shardlab.cell import Cell
from shardlab.cluster import Cluster
from shardlab.errors import InputError
from shardlab.matrix import Matrix
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace
from trainers import menu

SCALES = ("full", "tiny")


class Plan(msgspec.Struct, frozen=True):
    """A matrix resolved on a cluster: `cells` are those that --where leaves, `all_cells` every one.

    misfits: which of `cells` the cluster has not the machines for, and where in the file that was asked for.
    """

    matrix: Matrix
    all_cells: list[Cell]
    cells: list[Cell]
    repeats: int
    source: render.Source
    remarks: list[str]
    misfits: list[Misfit]


def of(
    workspace: Workspace,
    name: str,
    *,
    cluster_file: str | None,
    where: str | None,
    repeats: int | None,
    scale: str = "full",
) -> Plan:
    """Read, check and resolve. --where is about the cells of the file, also where a tiny twin is what runs.

    Raises InputError; nothing is written.
    """
    if repeats is not None and not 1 <= repeats <= 1000:
        raise InputError(f"--repeats: found {repeats}. Allowed: 1 to 1000.")
    asked = matrix.load(matrix.find(name))
    where_runs = cluster.find(Path(cluster_file) if cluster_file else None, workspace.path)
    if where_runs.provider != "local" and where_runs.slurm is None:
        raise InputError(
            f"the cluster {where_runs.name}: it has no Slurm to send runs to. "
            "Allowed: a cluster file with slurm, --cluster with another file, or none."
        )
    machine = _machine(where_runs)
    cells = resolve(asked, per_node=machine.gpus if where_runs.slurm else None)
    if scale == "tiny":
        cells = tiny.twins(cells, menu.workloads())
        tiny.must_train(cells)
    chosen = [cell for cell in cells if where is None or holds(condition(where), cell)]
    if not chosen:
        raise InputError(f"--where {where!r} leaves none of {len(cells)} cells.")
    runs_as = asked.name if scale == "full" else f"{asked.name}-{scale}"
    return Plan(
        matrix=asked,
        all_cells=cells,
        cells=chosen,
        repeats=repeats or asked.file.repeats,
        source=render.source(runs_as, where_runs, workspace),
        remarks=_remarks(chosen, machine, where_runs),
        misfits=misfits(asked, cells, machine, chosen),
    )


def _machine(where: Cluster) -> Machine:
    if where.slurm is not None:
        return Machine(nodes=len(where.with_role("worker")), gpus=where.gpus.per_node or None if where.gpus else None)
    here = host.observe()
    return Machine(nodes=1, gpus=len(here.gpus) if here.gpus else None, here=True)


def must_fit(plan: Plan) -> None:
    """Raises InputError that lists every chosen cell that the cluster has not the machines for."""
    if plan.misfits:
        raise plan.matrix.document.errors([one.problem for one in plan.misfits])


def render_all(plan: Plan, runs: Path) -> list[RunDir]:
    """The run folders of every repeat of every cell, below `runs`; what was sent already stays as it is."""
    folders = []
    for repeat in range(1, plan.repeats + 1):
        for cell in plan.cells:
            run = render.run_of(cell, repeat, 1, plan.source)
            existing = RunDir(runs / run.run_id)
            if not existing.path.exists() or existing.judge().state == "planned":
                folders.append(render.write(run, runs, plan.source))
    return folders


def _remarks(cells: Sequence[Cell], machine: Machine, where: Cluster) -> list[str]:
    remarks = tiny.dropped([cell.rehearses for cell in cells if cell.rehearses])
    processors = len(os.sched_getaffinity(0))
    most = max(cell.gpus for cell in cells)
    if where.slurm is not None:
        for name in sorted({cell.launcher for cell in cells if launcher(cell.launcher).needs}):
            programs = " and ".join(launcher(name).needs)
            remarks.append(f"the launcher {name} needs {programs} on each node; nothing here knows whether the nodes have it.")
    if where.provider == "virtual":
        remarks.append("practice nodes: their GPUs are known to Slurm alone; every rank is a process on this machine's CPU.")
    elif where.slurm is None and machine.gpus is None:
        remarks.append("no GPU here: every rank is a process on the CPU.")
        if most > processors:
            remarks.append(f"up to {most} ranks share {processors} processors: their timings say little.")
    if any(cell.rehearses for cell in cells):
        remarks.append("every cell is a rehearsal at scale tiny: it shows that the line works, not how fast it is.")
    elif any(cell.launcher == "fork" for cell in cells):
        remarks.append("cells with the launcher fork are a rehearsal: they show that the line works, not how fast it is.")
    return remarks
