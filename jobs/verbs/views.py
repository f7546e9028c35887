"""Prints plans and runs: tables on a terminal, plain lines in a pipe, one JSON document with --json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jobs.planner import cell_schedule, planner_table
from jobs.planner.cell_schedule import CellSchedule
from jobs.planner.scale_out import ScaledCell
from jobs.planning import batch_searches, cell_differences, claim_lint, datasets, gpu_hours, repeats
from jobs.planning.plan import MatrixPlan
from jobs.plugins.own_plugins import OwnPlugins
from jobs.slurm.share import AccountShare
from jobs.status import search_runs
from jobs.status.reconcile import Status
from jobs.verbs import status_table
from shardlab.cluster.lease import Lease
from shardlab.matrix.cell import AnyCell
from shardlab.plugins.plugin_kind import OwnWorkload
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.terminal.table import Column, Table
from shardlab.workspace import handles
from shardlab.workspace.inventory import read_lease
from shardlab.workspace.workspace import Workspace


def _format_length(cell: AnyCell) -> str:
    lengths = ((cell.steps, "steps"), (cell.epochs, "epochs"), (cell.warmup_steps or None, "warm-up"))
    return " + ".join(f"{number} {noun}" for number, noun in lengths if number is not None)


def _format_passes(cell: AnyCell) -> str:
    sizes = cell.micro_batch_size, cell.gradient_accumulation_steps
    return " x ".join(str(size) for size in sizes if size is not None)


PLAN_COLUMNS: list[Column[AnyCell]] = [
    Column("cell", lambda cell: cell.name(), priority=5),  # the handle and the other columns say as much
    Column("workload", lambda cell: cell.workload),
    Column("strategy", lambda cell: cell.strategy_text),
    Column("launcher", lambda cell: cell.launcher, priority=3),
    Column("ranks", lambda cell: str(cell.gpus)),
    Column("global batch", lambda cell: "" if cell.global_batch_size is None else str(cell.global_batch_size)),
    Column("micro x passes", _format_passes, priority=1),
    Column("length", _format_length, priority=4),
]


def print_plan(
    out: Output,
    plan: MatrixPlan,
    workspace: Workspace,
    missing_data: datasets.MissingData,
    cell_hours: Sequence[gpu_hours.CellHours] = (),
    account_shares: Sequence[AccountShare] = (),
    late_count: int = 0,
    scaled_cells: Mapping[str, Sequence[ScaledCell]] | None = None,
    schedule: CellSchedule | None = None,
) -> None:
    """Print a plan.

    missing_data: which data sets of the cells are missing.
    cell_hours: the GPU hours of each cell; empty without GPUs.
    account_shares: how much of its limits the user's Slurm account has left; empty if not known.
    late_count: the number of runs that would not end before the lease of the nodes.
    scaled_cells: the predictions on other numbers of GPUs, by the name of the cell; None if --scale-out is not given.
    schedule: the schedule of the cell that --schedule names; None if the option is not given.
    """
    _print_cells(out, plan, workspace)
    _print_predictions(out, plan)
    if scaled_cells is not None:
        planner_table.print_scale_out(out, scaled_cells)
    if schedule is not None:
        for sentence in cell_schedule.describe_schedule(schedule, plan.predictions[schedule.cell]):
            out.print_line(sentence)
    repeats_by_cell = {cell.name(): plan.repeats_by_cell[cell.name()] for cell in plan.cells}
    estimated_hours = gpu_hours.sum_hours(cell_hours) if cell_hours else None
    _print_amount_of_work(out, plan, repeats_by_cell, cell_hours, account_shares)
    lease = read_lease(workspace, plan.context.cluster.name)
    print_lease(out, lease, late_count)
    own_models = _select_own_models(plan.context.plugins, plan.cells)
    run_time_by_cell = {hours_of_cell.cell.name(): hours_of_cell.run_time for hours_of_cell in cell_hours}
    claim_hints = claim_lint.lint_claims(plan.matrix.file, plan.all_cells)
    _print_obstacles_and_notes(out, plan, own_models, missing_data, claim_hints)
    out.print_document(
        {
            "matrix": plan.context.matrix,
            "scale": "tiny" if any(cell.rehearses for cell in plan.cells) else "full",
            "repeats": max(repeats_by_cell.values()),
            "runs": sum(repeats_by_cell.values()),
            "cost": plan.estimated_cost,
            "gpu_hours": estimated_hours,
            "shares": account_shares,
            "lease": lease,
            "cells": [_make_cell_document(cell, plan, run_time_by_cell, scaled_cells) for cell in plan.cells],
            **({} if schedule is None else {"schedule": schedule}),
            "models": [_make_model_document(model) for model in own_models],
            "excluded": plan.matrix.excluded,
            "deviations": plan.matrix.file.deviations,
            "misfits": [{"id": hours_of_cell.cell_name, "why": hours_of_cell.why} for hours_of_cell in plan.misfits],
            "missing_data": missing_data.missing,
            "claim_hints": claim_hints,
        }
    )


def _print_cells(out: Output, plan: MatrixPlan, workspace: Workspace) -> None:
    """Print the table of the cells of a plan, and whether other verbs number these cells otherwise."""
    cell_names = [cell.name() for cell in plan.cells]
    difference_by_cell = dict(zip(cell_names, cell_differences.describe_differences(plan.cells), strict=True))
    handle_by_cell = handles.number_cells(cell.name() for cell in plan.all_cells)
    handle_column: Column[AnyCell] = handles.make_handle_column(lambda cell: handle_by_cell[cell.name()])
    differing_column: Column[AnyCell] = Column("differs in", lambda cell: difference_by_cell[cell.name()])
    columns = [handle_column, *PLAN_COLUMNS, *([differing_column] if any(difference_by_cell.values()) else [])]
    matrix_name = plan.context.matrix
    title = f"{matrix_name}: {plan.matrix.file.title}" if plan.matrix.file.title else matrix_name
    out.show_table(Table(title, columns, plan.cells))
    last_handles = workspace.number_cells()
    if last_handles and any(last_handles.get(cell.name()) != handle_by_cell[cell.name()] for cell in plan.cells):
        out.print_remark("note: until this matrix is submitted, c1, c2, ... name cells of the matrix submitted last")


def _print_predictions(out: Output, plan: MatrixPlan) -> None:
    """Print a table with the predictions for each cell; nothing is printed if nothing could be predicted."""
    cell_handles = handles.number_cells(cell.name() for cell in plan.all_cells)
    predictions = {cell.name(): plan.predictions[cell.name()] for cell in plan.cells}
    table = planner_table.make_predictions_table(predictions, cell_handles)
    if len(table.columns) > 2:
        out.show_table(table)
    if out.verbose:
        for sentence in dict.fromkeys(plan.predictions[cell.name()].how for cell in plan.cells):
            out.print_remark(f"predicted from: {sentence}")


def _print_amount_of_work(
    out: Output,
    plan: MatrixPlan,
    repeats_by_cell: Mapping[str, int],
    cell_hours: Sequence[gpu_hours.CellHours],
    account_shares: Sequence[AccountShare],
) -> None:
    """Print how many runs a plan has, how long they take, and how much of the user's Slurm account is left."""
    out.print_line(f"{repeats.describe_repeats(repeats_by_cell, plan.matrix.file.repeats)}.")
    for sentence in batch_searches.describe_searches(plan.cells, plan.context.search_by_family, plan.predictions):
        out.print_line(sentence)
    if plan.estimated_cost.cells:
        out.print_line(f"{_format_cost(plan.estimated_cost, len(repeats_by_cell))}.")
    if (estimated_hours := gpu_hours.sum_hours(cell_hours)).without_retries:
        out.print_line(f"about {gpu_hours.describe_hours(estimated_hours)}.")
        for sentence in filter(None, (gpu_hours.describe_retries(estimated_hours), gpu_hours.describe_limits(cell_hours))):
            out.print_line(f"{sentence}.")
    for share in account_shares:
        out.print_line(f"sshare: the account {share.account} has {share.describe_remaining_hours()}.")
    for sentence in planner_table.describe_sums(plan.predictions, repeats_by_cell):
        out.print_line(sentence)


def _print_obstacles_and_notes(
    out: Output,
    plan: MatrixPlan,
    own_models: Sequence[OwnWorkload],
    missing_data: datasets.MissingData,
    claim_hints: Sequence[str],
) -> None:
    """Print excluded cells, facts about own models, cells that do not fit the cluster, advice, missing data, and notes, also
    those on claims."""
    for excluded_entry in plan.matrix.excluded:
        keys_text = ", ".join(f"{key}={value}" for key, value in excluded_entry.cell.items() if _varies_in_matrix(plan, key))
        out.print_line(f"excluded: {keys_text}: {excluded_entry.why}")
    for sentence in (sentence for model in own_models for sentence in _describe_model(model)):
        out.print_line(sentence)
    for why, count in Counter(misfit.why for misfit in plan.misfits).items():
        out.print_line(f"not on this cluster: {count} cell(s): {why}")
    for sentence in plan.fit_advice:
        out.print_line(sentence)
    for sentence in missing_data.missing:
        out.print_line(f"no data: {sentence}")
    if missing_data.unknown:
        out.print_remark(f"note: {missing_data.unknown}")
    for remark in [*plan.remarks, *claim_hints]:
        out.print_remark(f"note: {remark}")


def print_lease(out: Output, lease: Lease | None, late_count: int = 0) -> None:
    """Print when the lease of the nodes ends; nothing if the nodes are not lent. late_count: the number of runs that would not
    end before the lease."""
    if lease is not None:
        current_time = datetime.now(UTC)
        out.print_line(lease.describe(current_time))
        if late_count:
            hint = "To ask for an extension: provision CLUSTER.yaml extend --hours N --reason TEXT"
            out.print_line(f"about {late_count} run(s) would not end before the lease. {hint}")
        if (reminder := lease.make_copy_reminder(current_time)) is not None:
            out.print_line(reminder)


def print_status(out: Output, statuses: Sequence[Status], workspace: Workspace) -> None:
    """Print the table of runs and the lease of their nodes, or the JSON document."""
    if not statuses and not out.json:
        out.print_line(f"no runs{' that match' * any(workspace.list_run_ids())} in {workspace.path}.")
    elif not out.json:
        table = status_table.make_table(statuses, out.width)
        out.show_table(table)
        for line in status_table.list_reasons(table):
            out.print_line(line)
        out.print_line(status_table.summarize_runs(statuses))
    searches = search_runs.read_search_paths(workspace, statuses)
    for path in searches:
        out.print_line(search_runs.describe_search(path))
    print_lease(out, lease := read_lease(workspace))
    search_documents = {"searches": [search_runs.make_search_document(path) for path in searches]} if searches else {}
    out.print_document({"runs": statuses, **search_documents, **({} if lease is None else {"lease": lease})})


def _make_cell_document(
    cell: AnyCell,
    plan: MatrixPlan,
    run_time_by_cell: Mapping[str, gpu_hours.RunTime | None],
    scaled_cells: Mapping[str, Sequence[ScaledCell]] | None,
) -> dict[str, Any]:
    """A cell of a plan as a dictionary, for --json. run_time_by_cell: how long a run takes, by the name of the cell.
    scaled_cells: as for `print_plan`."""
    name, search = cell.name(), plan.context.find_search(cell)
    return {
        "id": name,
        "repeats": plan.repeats_by_cell[name],
        "rehearsal": plan.context.plans_rehearsal(cell),
        "cell": cell,
        "predicted": plan.predictions[name],
        "run_time": run_time_by_cell.get(name),
        **({} if search is None else {"search": search.to_json_fields()}),
        **({} if scaled_cells is None else {"scale_out": scaled_cells.get(name, [])}),
    }


def _format_cost(cost: repeats.EstimatedCost, cell_count: int) -> str:
    """The estimated time of all runs of a plan as text. If only some cells have a recorded time, the text says how many.

    cell_count: the number of cells of the plan.
    """
    cells_clause = "" if cost.cells == cell_count else f" for {cost.cells} of {cell_count} cells"
    basis_clause = ", estimated from the runs that completed in this workspace"
    sequential_time, summed_time = (moments.format_duration(3600 * hours) for hours in (cost.hours, cost.rank_hours))
    return f"about {sequential_time} in sequence, {summed_time} summed over ranks (or GPUs){cells_clause}{basis_clause}"


def _varies_in_matrix(plan: MatrixPlan, key: str) -> bool:
    file = plan.matrix.file
    return key in file.axes or any(key in group for group in file.zip)


def _select_own_models(plugins: OwnPlugins, cells: Sequence[AnyCell]) -> list[OwnWorkload]:
    """The workloads of these cells that do not ship with shardlab, sorted by name."""
    models_by_name = {cell.workload: model for cell in cells if (model := plugins.find_workload(cell)) is not None}
    return [models_by_name[name] for name in sorted(models_by_name)]


def _describe_model(model: OwnWorkload) -> list[str]:
    """Sentences about a model: first its parameters, blocks and FLOPs; then each fact that could not be derived, and which
    strategies are not possible for that reason."""
    block_clause = f" ({model.block})" if model.block else ""
    blocks_clause = f"{model.block_count} blocks{block_clause}" if model.block_count else "no blocks"
    unit = model.unit.removesuffix("s")
    length_clause = "" if model.seq_len is None else f", in sequences of {model.seq_len}"
    flops_clause = (
        "unknown FLOPs"
        if model.flops_per_unit is None
        else f"{model.flops_per_unit / 1e6:,.1f} MFLOP per {unit}{length_clause}"
    )
    degrees_clause = f"; tp: {', '.join(map(str, (1, *model.tensor_degrees)))}" if model.tensor_degrees else ""
    derived_sentence = f"{model.name}: {model.summary.removesuffix('.')}: {model.parameters:,} parameters, "
    derived_sentence += f"{blocks_clause}, {flops_clause}{degrees_clause}."
    unknown_facts = [f"{model.name}: {remark}." for remark in model.remarks]
    hint_sentences = [f"{model.name}: a model by code can define what is not known here (docs/own-models.md)."]
    return [derived_sentence, *unknown_facts, *(hint_sentences if unknown_facts else [])]


def _make_model_document(model: OwnWorkload) -> dict[str, Any]:
    """The same facts about a model as a dictionary, for --json."""
    return {
        "name": model.name,
        "summary": model.summary,
        "code": model.code,
        "parameters": model.parameters,
        "block": model.block or None,
        "blocks": model.block_count,
        "unit": model.unit,
        "flops_per_unit": model.flops_per_unit,
        "flops_source": model.flops_source,
        "seq_len": model.seq_len,
        "tensor_degrees": model.tensor_degrees,
        "most_stages": model.most_stages,
        "not_derived": model.remarks,
    }
