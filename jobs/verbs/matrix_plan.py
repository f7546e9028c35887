"""The plan of the matrix that the options of a verb name, with predictions by formula and by rehearsal."""

from __future__ import annotations

import msgspec

from jobs import on_controller
from jobs.planning import plan, plan_predictions, rehearsals
from jobs.planning.plan import MatrixPlan
from jobs.planning.rehearsals import Rehearsals
from jobs.plugins.own_plugins import OwnPlugins
from jobs.rendering import preview, render
from jobs.verbs import adapted_matrix, shared_options
from shardlab.errors import InputError
from shardlab.matrix.overrides import SET_REASON
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation


def add_rehearse_options(parser: Parser) -> None:
    """Add the options --rehearse and --full-depth to the parser of a verb."""
    rehearse_help = (
        "find memory and traffic of each cell by a rehearsal: its own code makes a step on tensors without memory, which needs "
        "torch but no GPU, and takes 10 s to minutes; the workspace keeps the answers, and later commands use them"
    )
    parser.add_argument("--rehearse", action="store_true", help=rehearse_help)
    depth_help = "with --rehearse: rehearse deep models at their own depth, without extrapolation from two smaller depths"
    parser.add_argument("--full-depth", action="store_true", help=depth_help)


def plan_with_options(invocation: Invocation) -> MatrixPlan:
    """The plan of the matrix that the options of `shared_options.add_matrix_options` name, with its predictions."""
    arguments = invocation.arguments
    matrix_plan = plan.plan_matrix(
        invocation.workspace,
        arguments.matrix,
        invocation.cluster,
        where=arguments.where,
        repeats=arguments.repeats,
        scale=arguments.scale,
        in_allocation=getattr(arguments, "in_allocation", False),
        track=shared_options.read_tracker(invocation),
        wait_gpus_s=shared_options.read_wait_gpus_s(arguments),
        settings=arguments.settings,
    )
    for change in matrix_plan.matrix.file.deviations:
        if change.why == SET_REASON:
            invocation.out.print_line(adapted_matrix.describe_change(change))
    return _add_rehearsals(invocation, matrix_plan)


def plan_preview(invocation: Invocation, matrix_plan: MatrixPlan) -> MatrixPlan:
    """The plan with scripts for reading, which need no inventory and no login."""
    cluster = matrix_plan.context.cluster
    script_preview = preview.make_preview(invocation.workspace, cluster, on_login_node=on_controller.starts_runs_here(cluster))
    return msgspec.structs.replace(matrix_plan, context=render.render_for_reading(matrix_plan.context, script_preview))


def _add_rehearsals(invocation: Invocation, plan: MatrixPlan) -> MatrixPlan:
    """The plan with predictions from the rehearsals that the workspace has; with --rehearse, missing rehearsals are made. A
    cell that cannot be rehearsed keeps its prediction by formula, and the reason is printed. Raises InputError."""
    answer_by_cell = make_rehearsals(invocation, plan.context.plugins).get_answers(plan.cells)
    if not answer_by_cell:
        return plan
    for sentence in rehearsals.describe_refused_rehearsals(answer_by_cell):
        invocation.out.print_remark(sentence, style="yellow")
    cells = [cell for cell in plan.cells if cell.name() in answer_by_cell]
    predictions = plan_predictions.predict_cells(
        invocation.workspace, plan.context.cluster, cells, plan.recorded_s, answer_by_cell
    )
    all_predictions = {**plan.predictions, **predictions}
    render_context = msgspec.structs.replace(plan.context, predictions=all_predictions)
    return msgspec.structs.replace(plan, predictions=all_predictions, context=render_context)


def make_rehearsals(invocation: Invocation, plugins: OwnPlugins) -> Rehearsals:
    """The rehearsals of a command, by its options --rehearse and --full-depth. Raises InputError."""
    makes_missing, full_depth = (getattr(invocation.arguments, name, False) for name in ("rehearse", "full_depth"))
    if full_depth and not makes_missing:
        raise InputError("--full-depth: allowed only together with --rehearse.")
    return Rehearsals(invocation.workspace, plugins, invocation.out, makes_missing=makes_missing, full_depth=full_depth)
