"""The verb `jobs plan`."""

from __future__ import annotations

from jobs.planner import cell_schedule, machine, scale_out
from jobs.planner.cell_schedule import CellSchedule
from jobs.planner.scale_out import ScaledCell
from jobs.planning import datasets, plan, plan_predictions
from jobs.planning.plan import MatrixPlan
from jobs.submission import lease_schedule
from jobs.verb import JobsVerb
from jobs.verbs import adapted_matrix, matrix_plan, shared_options, views
from jobs.verbs.shared_options import MOST_GPUS
from shardlab.errors import InputError, UnknownName
from shardlab.matrix.cell import select_trainings
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation
from shardlab.workspace import handles, inventory


class PlanVerb(JobsVerb):
    """Print the cells of a matrix, and which cells it excludes and why."""

    name = "plan"
    example = "jobs plan --matrix quickstart"

    def add_options(self, parser: Parser) -> None:
        shared_options.add_matrix_options(parser)
        adapted_matrix.add_adapt_option(parser)
        scale_help = "also predict each cell on these numbers of GPUs, with the same batch per GPU, and how far to trust it"
        parser.add_list_option("--scale-out", metavar="N,...", help=scale_help)
        schedule_help = "also draw the simulated pipeline schedule of this cell: when each rank computes, and when it waits"
        parser.add_argument("--schedule", metavar="CELL", help=schedule_help)
        matrix_plan.add_rehearse_options(parser)

    def prepare(self, invocation: Invocation) -> None:
        adapted_matrix.use_adapted_matrix(invocation)

    def run(self, invocation: Invocation) -> int:
        planned_matrix = matrix_plan.plan_with_options(invocation)
        workspace = invocation.workspace
        missing_data = datasets.find_missing_data(planned_matrix.cells, planned_matrix.context, workspace)
        cell_hours = plan.estimate_hours(planned_matrix, planned_matrix.repeats_by_cell)
        account_shares = plan.read_account_shares(planned_matrix, workspace)
        scaled_cells, schedule = scale_out_cells(invocation, planned_matrix), simulate_schedule(invocation, planned_matrix)
        late_count = lease_schedule.count_late_runs(planned_matrix, workspace)
        views.print_plan(
            invocation.out,
            planned_matrix,
            workspace,
            missing_data,
            cell_hours,
            account_shares,
            late_count,
            scaled_cells,
            schedule,
        )
        return 0


def simulate_schedule(invocation: Invocation, plan: MatrixPlan) -> CellSchedule | None:
    """The simulated schedule of the cell that --schedule names; None if the option is not given. Raises InputError."""
    if invocation.arguments.schedule is None:
        return None
    name = handles.find_cell_id(invocation.arguments.schedule, handles.number_cells(cell.name() for cell in plan.all_cells))
    cell_by_name = {cell.name(): cell for cell in select_trainings(plan.cells) if cell.pp > 1}
    if not cell_by_name:
        raise InputError(f"--schedule: no selected cell of {plan.matrix.name} has a pipeline. Allowed: cells with pp above 1.")
    if name not in cell_by_name:
        raise UnknownName("cell with a pipeline", name, cell_by_name, place="--schedule")
    return cell_schedule.make_schedule(cell_by_name[name])


def scale_out_cells(invocation: Invocation, plan: MatrixPlan) -> dict[str, list[ScaledCell]] | None:
    """The predictions for each cell of a plan on the numbers of GPUs given by --scale-out, by the name of the cell; None if the
    option is not given. Raises InputError."""
    counts_text: str | None = invocation.arguments.scale_out
    if counts_text is None:
        return None
    count_texts = counts_text.split(",")
    if not all(count_text.strip().isdecimal() and 1 <= int(count_text) <= MOST_GPUS for count_text in count_texts):
        raise InputError(
            f"--scale-out: found {counts_text!r}. Allowed: numbers of GPUs from 1 to {MOST_GPUS}, such as 16,64,512."
        )
    cluster = plan.context.cluster
    calibration = plan_predictions.load_calibration(invocation.workspace)
    measured_all_reduces = inventory.read_all_reduces(invocation.workspace, cluster.name)
    scaled_by_cell: dict[str, list[ScaledCell]] = {}
    for cell in select_trainings(plan.cells):
        gpus = cluster.select_gpu_type(cell.gpu_type).gpus
        gpus_per_node = (gpus.per_node if gpus is not None and gpus.per_node else None) or -(-cell.gpus // cell.nnodes)
        planned_machine = machine.plan_machine(cluster, cell.gpu_type, measured_all_reduces)
        scaled_cells = [
            scale_out.extrapolate_to_gpus(cell, int(count_text), gpus_per_node, planned_machine, calibration)
            for count_text in count_texts
        ]
        scaled_by_cell[cell.name()] = [scaled_cell for scaled_cell in scaled_cells if scaled_cell is not None]
    return scaled_by_cell
