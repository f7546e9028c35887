"""The verb `jobs submit`."""

from __future__ import annotations

from functools import partial

from jobs import on_controller
from jobs.planner import planner_table
from jobs.planning import plan
from jobs.planning.plan import MatrixPlan, leave_out_cells_over_memory
from jobs.submission import submit
from jobs.verb import JobsVerb
from jobs.verbs import adapted_matrix, archived_matrix, matrix_plan, sending, shared_options
from shardlab import completion
from shardlab.runs import trackers
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation
from shardlab.workspace.workspace import Workspace


class SubmitVerb(JobsVerb):
    """Render and submit the runs of a matrix that were not submitted before."""

    name = "submit"
    example = "jobs submit --matrix quickstart --wait"
    permission = "start runs"
    starts_runs = makes_runs = True

    def add_options(self, parser: Parser) -> None:
        shared_options.add_matrix_options(parser, archives=True)
        adapted_matrix.add_adapt_option(parser)
        shared_options.add_wait_option(parser)
        after_help = "on Slurm: start after these runs have ended (run id or shell pattern)"
        completion.offer_completions(parser.add_argument("--after", metavar="RUN", help=after_help), Workspace.list_run_ids)
        dry_run_help = "print what would be submitted, and submit nothing; with -v also print the scripts"
        parser.add_argument("--dry-run", action="store_true", help=dry_run_help)
        inside_help = "inside `salloc` or a notebook's job: run the cells in this allocation, one after another"
        parser.add_argument("--in-allocation", action="store_true", help=inside_help)
        fit_help = "also submit cells that the planner predicts not to fit the memory of a GPU or of a node"
        parser.add_argument("--no-fit-check", action="store_true", help=fit_help)
        bound_help = (
            "submit nothing if the runs may take more GPU hours: by recorded times, else by the high end of "
            "predictions, else by time limits; retries count"
        )
        parser.add_argument("--max-gpu-hours", type=float, metavar="N", help=bound_help)
        resume_help = (
            "resume from a checkpoint of this run; cells may differ from it only in their ranks and how the "
            "ranks share the batch (if the checkpoint has the layout `whole`, also in their strategy)"
        )
        completion.offer_completions(
            parser.add_argument("--resume-from", metavar="RUN", help=resume_help), Workspace.list_run_ids
        )
        tracker_names = ", ".join(trackers.TRACKERS)
        track_help = (
            f"log runs while they go on, offline, into {trackers.TRACKER_FOLDER}/ of the workspace: "
            f"{tracker_names} (docs/exports.md)"
        )
        track_option = parser.add_argument("--track", metavar="TRACKER", help=track_help)
        completion.offer_completions(track_option, lambda _: trackers.TRACKERS)
        shared_options.add_sharing_options(parser)

    def prepare(self, invocation: Invocation) -> None:
        archived_matrix.use_archived_matrix(invocation)
        adapted_matrix.use_adapted_matrix(invocation)

    def run(self, invocation: Invocation) -> int:
        arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
        planned = matrix_plan.plan_with_options(invocation)
        if arguments.resume_from:
            arguments.resume_from = workspace.find_run_dir(arguments.resume_from, planned.context.matrix).run_id
        plan.must_fit_cluster(planned)
        planned = _keep_fitting_cells(invocation, planned)
        is_preview = on_controller.is_preview(invocation)
        planned = matrix_plan.plan_preview(invocation, planned) if is_preview else planned
        render_context = planned.context
        submit_options = shared_options.read_submit_options(invocation, render_context)
        if not is_preview:
            on_controller.must_suit_workspace(render_context.cluster, workspace)
            sending.must_have_data(out, workspace, planned.cells, render_context)
        submit.check_runs(workspace, planned.cells, planned.repeats_by_cell, render_context, arguments.resume_from)
        resumed_run = arguments.resume_from
        decide = partial(submit.decide_runs, workspace, planned.cells, planned.repeats_by_cell, render_context, resumed_run)
        return sending.submit_runs(invocation, render_context, submit_options, decide, planned)


def _keep_fitting_cells(invocation: Invocation, plan: MatrixPlan) -> MatrixPlan:
    """The plan without the cells that certainly do not fit the memory of a GPU or of a node. The name of each cell that is left
    out is printed. With --no-fit-check, the plan is returned unchanged."""
    if invocation.arguments.no_fit_check:
        return plan
    fitting_cells, left_out_names = leave_out_cells_over_memory(plan)
    for cell_name in left_out_names:
        invocation.out.print_remark(
            f"{cell_name}: left out, because it needs at least "
            f"{planner_table.describe_missing_memory(plan.predictions[cell_name])}. To submit it all the same: --no-fit-check.",
            style="yellow",
        )
    for sentence in planner_table.describe_host_memory(
        {cell.name(): plan.predictions[cell.name()] for cell in fitting_cells.cells}
    ):
        invocation.out.print_remark(sentence, style="yellow")
    return fitting_cells
