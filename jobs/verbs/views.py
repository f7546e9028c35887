"""Prints plans and runs: tables on a terminal, plain lines in a pipe, one JSON document with --json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jobs.planner import cell_schedule, planner_table
from jobs.planner.cell_schedule import CellSchedule
from jobs.planner.scale_out import ScaledCell
from jobs.planning import batch_searches, cell_differences, datasets, gpu_hours, repeats
from jobs.planning.plan import MatrixPlan
from jobs.plugins.own_workloads import OwnWorkloads
from jobs.rendering import render
from jobs.scheduler import scheduler
from jobs.slurm.share import Share
from jobs.status import search_runs
from jobs.status.reconcile import Status
from jobs.submission.lease_report import LeaseReport
from jobs.submission.submit import RunDecision
from jobs.verbs import status_table
from shardlab.matrix.cell import Cell
from shardlab.plugins.own_workload import OwnWorkload
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

PLAN_COLUMNS = [
    "cell", "workload", "strategy", "launcher", "ranks", "global batch", "micro x passes", "length",
]  # fmt: skip


def plan(
    out: Output,
    planned: MatrixPlan,
    data: datasets.MissingData,
    hours: Sequence[gpu_hours.CellHours] = (),
    shares: Sequence[Share] = (),
    lease: LeaseReport | None = None,
    scaled: Mapping[str, Sequence[ScaledCell]] | None = None,
    schedule: CellSchedule | None = None,
) -> None:
    """Print a plan.

    data: which data sets of the cells are missing.
    hours: the GPU hours of each cell; empty without GPUs.
    shares: how much of its limits the user's Slurm account has left; empty if not known.
    lease: the report on the lease of the nodes; None without a lease.
    scaled: the predictions on other numbers of GPUs, by the name of the cell; None if --scale-out is not given.
    schedule: the schedule of the cell that --schedule names; None if the option is not given.
    """
    rows = [[cell.name(), *_cell(cell)] for cell in planned.cells]
    columns = PLAN_COLUMNS
    if any(differ := cell_differences.of(planned.cells)):
        rows = [[*row, one] for row, one in zip(rows, differ, strict=True)]
        columns = [*columns, "differs in"]
    named = planned.source.matrix
    title = f"{named}: {planned.matrix.file.title}" if planned.matrix.file.title else named
    out.table(title, columns, rows)
    _predictions(out, planned)
    if scaled is not None:
        planner_table.scale_out(out, scaled)
    if schedule is not None:
        for sentence in cell_schedule.sentences(schedule, planned.predicted[schedule.cell]):
            out.line(sentence)
    counts = {cell.name(): planned.repeats[cell.name()] for cell in planned.cells}
    out.line(f"{repeats.in_words(counts, planned.matrix.file.repeats)}.")
    for sentence in batch_searches.sentences(planned.cells, planned.source.searches, planned.predicted):
        out.line(sentence)
    if planned.cost.cells:
        out.line(f"{_hours(planned.cost, len(counts))}.")
    asked = gpu_hours.total(hours) if hours else None
    if asked is not None and asked.measured + asked.limits:
        out.line(f"about {gpu_hours.in_words(asked)}.")
        if retried := gpu_hours.retries_in_words(asked):
            out.line(f"{retried}.")
    for share in shares:
        out.line(f"sshare: the account {share.account} has {share.in_words()}.")
    for sentence in planner_table.sums(planned.predicted, counts):
        out.line(sentence)
    lease_lines(out, lease)
    for one in planned.matrix.excluded:
        keys = ", ".join(f"{key}={value}" for key, value in one.cell.items() if _varies(planned, key))
        out.line(f"excluded: {keys}: {one.why}")
    models = _select_own_models(planned.source.own.workloads, planned.cells)
    for sentence in (sentence for model in models for sentence in _describe_model(model)):
        out.line(sentence)
    for why, count in Counter(misfit.why for misfit in planned.misfits).items():
        out.line(f"not on this cluster: {count} cell(s): {why}")
    for sentence in planned.advice:
        out.line(sentence)
    for sentence in data.missing:
        out.line(f"no data: {sentence}")
    if data.unknown:
        out.remark(f"note: {data.unknown}")
    for remark in planned.remarks:
        out.remark(f"note: {remark}")
    out.document(
        {
            "matrix": named,
            "scale": "tiny" if any(cell.rehearses for cell in planned.cells) else "full",
            "repeats": max(counts.values()),
            "runs": sum(counts.values()),
            "cost": planned.cost,
            "gpu_hours": asked,
            "shares": shares,
            "lease": None if lease is None else lease.document(),
            "cells": [
                {
                    "id": cell.name(),
                    "repeats": counts[cell.name()],
                    "rehearsal": planned.source.plans_rehearsal(cell),
                    "cell": cell,
                    "predicted": planned.predicted[cell.name()],
                    **({"search": search.described()} if (search := planned.source.search_of(cell)) is not None else {}),
                    **({} if scaled is None else {"scale_out": scaled.get(cell.name(), [])}),
                }
                for cell in planned.cells
            ],
            **({} if schedule is None else {"schedule": schedule}),
            "models": [_make_model_document(model) for model in models],
            "excluded": planned.matrix.excluded,
            "deviations": planned.matrix.file.deviations,
            "misfits": [{"id": one.cell, "why": one.why} for one in planned.misfits],
            "missing_data": data.missing,
        }
    )


def _predictions(out: Output, planned: MatrixPlan) -> None:
    """Print a table with the predictions for each cell; nothing is printed if nothing could be predicted."""
    foreseen = planner_table.columns([planned.predicted[cell.name()] for cell in planned.cells])
    if foreseen:
        names = [cell.name() for cell in planned.cells]
        out.table("predicted", ["cell", *foreseen], [list(row) for row in zip(names, *foreseen.values(), strict=True)])
    if out.verbose:
        for sentence in dict.fromkeys(planned.predicted[cell.name()].how for cell in planned.cells):
            out.remark(f"predicted from: {sentence}")


def steps(out: Output, decided: Sequence[RunDecision], *, sent: bool, waiting: Collection[str] = ()) -> None:
    """Print a line for each run that says what is done with the run and why.

    sent: whether the runs were submitted; false in a dry run. waiting: the ids of the runs that the full scheduler did not
    accept.
    """
    verb = "submitted" if sent else "would be submitted"
    for step in decided:
        if step.now is not None and step.now.is_unreadable:
            continue  # the caller prints runs whose records cannot be read, with the reason
        what = step.why if step.held_back else f"skipped: {step.why}"
        if step.send:
            what = f"{'waits to be submitted' if step.run.run_id in waiting else verb} ({step.why})"
        out.line(f"{step.run.run_id}: {what}", style=None if step.send else "dim")
    send, back = sum(step.send for step in decided), sum(step.held_back for step in decided)
    wait = f", {len(waiting)} wait for room" if waiting else ""
    held = f", {back} {'held back' if sent else 'would be held back'}" if back else ""
    out.line(f"{send - len(waiting)} run(s) {verb}{wait}{held}, {len(decided) - send - back} skipped.")


def scripts(out: Output, decided: Sequence[RunDecision], workspace: Workspace, source: render.RenderContext) -> None:
    """With --verbose, print the scripts of the runs that would be submitted, exactly as they would be written."""
    for step in decided:
        folder = workspace.runs / step.run.run_id
        if step.send and out.verbose:
            name = scheduler(source.scheduler).SCRIPT
            out.line(f"\n# {folder}/{name}\n{render.script(step.run, folder, source.where, source.own_templates)}")


def lease_lines(out: Output, lease: LeaseReport | None) -> None:
    """Print when the lease of the nodes ends, and which runs would not end before this time. Without a lease, nothing is
    printed."""
    if lease is not None:
        for sentence in lease.sentences(datetime.now(UTC)):
            out.line(sentence)


def status(out: Output, runs: Sequence[Status], workspace: Workspace, lease: LeaseReport | None = None) -> None:
    """Print the table of runs and the lease of their nodes, or the JSON document."""
    if not runs and not out.json:
        out.line(f"no runs in {workspace.path}.")
    elif not out.json:
        shown = status_table.table(runs, out.width)
        out.table("", shown.columns, shown.rows, shown.styles)
        for line in shown.below:
            out.line(line)
        out.line(status_table.summary(runs))
    searches = search_runs.paths(workspace, runs)
    for path in searches:
        out.line(search_runs.sentence(path))
    lease_lines(out, lease)
    of_searches = {"searches": [search_runs.described(path) for path in searches]} if searches else {}
    out.document({"runs": runs, **of_searches, **({} if lease is None else {"lease": lease.document()})})


def _cell(cell: Cell) -> list[str]:
    length = f"{cell.steps} steps" if cell.steps is not None else f"{cell.epochs} epochs"
    if cell.warmup_steps:
        length += f" + {cell.warmup_steps} warm-up"
    passes = f"{cell.micro_batch_size} x {cell.gradient_accumulation_steps}"
    return [cell.workload, cell.strategy, cell.launcher, str(cell.gpus), str(cell.global_batch_size), passes, length]


def _hours(cost: repeats.Cost, cells: int) -> str:
    """The estimated time of all runs of a plan as text. If only some cells have a recorded time, the text says how many.

    cells: the number of cells of the plan.
    """
    of = "" if cost.cells == cells else f" for {cost.cells} of {cells} cells"
    told = ", estimated from the runs that completed in this workspace"
    all_runs, all_ranks = (moments.duration(3600 * hours) for hours in (cost.hours, cost.rank_hours))
    return f"about {all_runs} in sequence, {all_ranks} summed over ranks (or GPUs){of}{told}"


def _varies(planned: MatrixPlan, key: str) -> bool:
    file = planned.matrix.file
    return key in file.axes or any(key in group for group in file.zip)


def _select_own_models(own: OwnWorkloads, cells: Sequence[Cell]) -> list[OwnWorkload]:
    """The workloads of these cells that do not ship with shardlab, sorted by name."""
    found = {cell.workload: known for cell in cells if (known := own.of(cell)) is not None}
    return [found[name] for name in sorted(found)]


def _describe_model(known: OwnWorkload) -> list[str]:
    """Sentences about a model: first its parameters, blocks and FLOPs; then each fact that could not be derived, and which
    strategies are not possible for that reason."""
    kind = f" ({known.block})" if known.block else ""
    blocks = f"{known.block_count} blocks{kind}" if known.block_count else "no blocks"
    unit = known.unit.removesuffix("s")
    length = "" if known.seq_len is None else f", in sequences of {known.seq_len}"
    flops = "unknown FLOPs" if known.flops_per_unit is None else f"{known.flops_per_unit / 1e6:,.1f} MFLOP per {unit}{length}"
    degrees = f"; tp: {', '.join(map(str, (1, *known.tensor_degrees)))}" if known.tensor_degrees else ""
    derived = f"{known.name}: {known.summary.removesuffix('.')}: {known.parameters:,} parameters, {blocks}, {flops}{degrees}."
    lacking = [f"{known.name}: {remark}." for remark in known.remarks]
    helps = [f"{known.name}: a model by code can define what is not known here (docs/own-models.md)."]
    return [derived, *lacking, *(helps if lacking else [])]


def _make_model_document(known: OwnWorkload) -> dict[str, Any]:
    """The same facts about a model as a dictionary, for --json."""
    return {
        "name": known.name,
        "summary": known.summary,
        "code": known.code,
        "parameters": known.parameters,
        "block": known.block or None,
        "blocks": known.block_count,
        "unit": known.unit,
        "flops_per_unit": known.flops_per_unit,
        "flops_source": known.flops_source,
        "seq_len": known.seq_len,
        "tensor_degrees": known.tensor_degrees,
        "most_stages": known.most_stages,
        "not_derived": known.remarks,
    }
