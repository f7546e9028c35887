"""The part of the command `jobs` that uses the planner: the verb advise, and the options --scale-out, --schedule,
--no-fit-check and --rehearse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from jobs.invocation import Invocation
from jobs.planner import advise, cell_schedule, gpu, link, machine, planner_table, scale_out
from jobs.planner.cell_schedule import CellSchedule
from jobs.planner.machine import PlannedMachine
from jobs.planner.scale_out import ScaledCell
from jobs.planning import plan, plan_predictions, rehearsals
from jobs.planning.plan import MatrixPlan, leave_out_cells_over_memory
from jobs.planning.rehearsals import Rehearsals
from jobs.plugins.own_plugins import OwnPlugins
from jobs.verbs import shared_options
from shardlab.errors import InputError, UnknownName
from shardlab.matrix.cell import Cell
from shardlab.runs.rehearsed import Answer
from shardlab.terminal import console
from shardlab.workspace import inventory
from trainers import menu
from trainers.model.precision import ALL

MOST_GPUS = 1_000_000


def add_fit_check(verb: console.Parser) -> None:
    """Add the option --no-fit-check to a verb."""
    fit_help = "also submit cells that the planner predicts not to fit the memory of a GPU: out of memory is a result"
    verb.add_argument("--no-fit-check", action="store_true", help=fit_help)


def add_plan_options(verb: console.Parser) -> None:
    """Add the options --scale-out and --schedule to a verb."""
    scale_help = "also predict each cell on these numbers of GPUs, with the same batch per GPU, and how far to trust it"
    verb.add_list_option("--scale-out", metavar="N,...", help=scale_help)

    schedule_help = "also draw the simulated pipeline schedule of this cell: when each rank computes, and when it waits"
    verb.add_argument("--schedule", metavar="CELL", help=schedule_help)


def add_rehearse(verb: console.Parser) -> None:
    """Add the options --rehearse and --full-depth to a verb."""
    rehearse_help = (
        "find memory and traffic of each cell by a rehearsal: its own code makes a step on tensors without memory, which needs "
        "torch but no GPU, and takes 10 s to minutes; the workspace keeps the answers, and later commands use them"
    )
    verb.add_argument("--rehearse", action="store_true", help=rehearse_help)
    depth_help = "with --rehearse: rehearse deep models at their own depth, without extrapolation from two smaller depths"
    verb.add_argument("--full-depth", action="store_true", help=depth_help)


def add_advise(verbs: console.Verbs) -> None:
    """Add the verb advise, with its options."""
    verb = verbs.add("advise", _advise, "rank the strategies for a workload on given GPUs by predicted speed and memory")
    verb.add_argument("--workload", required=True, metavar="NAME", help="a workload that ships (jobs workloads)")
    verb.add_argument("--gpus", required=True, type=int, metavar="N", help="number of GPUs in all")
    verb.add_argument("--gpu", required=True, metavar="TYPE", help="GPU model, such as a100-80gb or its NVML name")
    link_help = "link between the GPUs of a node, or between nodes if there are several (default: that of the GPU)"
    verb.add_argument("--link", metavar="LINK", help=link_help)
    verb.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    verb.add_argument("--precision", default="bf16", metavar="NAME", help="precision of the cells (default: bf16)")
    add_rehearse(verb)


def _advise(invocation: Invocation) -> int:
    arguments, out = invocation.arguments, invocation.out
    gpu_model = gpu.must_find_model(arguments.gpu)
    workload = menu.workload(arguments.workload)
    if arguments.precision not in ALL:
        raise UnknownName("precision", arguments.precision, ALL, where="--precision")
    if arguments.link is not None and arguments.link not in link.link_entries():
        raise UnknownName("link", arguments.link, link.link_entries(), where="--link")
    if not 1 <= arguments.gpus <= MOST_GPUS or not 1 <= arguments.nodes <= arguments.gpus or arguments.gpus % arguments.nodes:
        given_numbers = f"--gpus {arguments.gpus} --nodes {arguments.nodes}"
        raise InputError(f"{given_numbers}: allowed are 1 to {MOST_GPUS} GPUs, and a number of nodes that divides them.")
    if arguments.nodes > 1 and arguments.link is None:
        raise InputError("--link: with several nodes, the link between them is needed, such as infiniband-hdr.")
    inside = link.make_data_sheet_link(gpu_model)
    between = None
    if arguments.link is not None:
        chosen_link = link.find_link(arguments.link, gpu_model)
        assert chosen_link is not None
        inside, between = (chosen_link, None) if arguments.nodes == 1 else (inside, chosen_link)
    planned = PlannedMachine(True, arguments.gpu, gpu_model, gpu.capacity(gpu_model, None), inside, between)
    slowest = arguments.link or ("nvlink" if gpu_model.link.startswith("NVLink") else "pcie")
    all_answers: dict[str, Answer] = {}
    source = _make_rehearsals(invocation, OwnPlugins())

    def answers(cells: Sequence[Cell]) -> Mapping[str, Answer]:
        new_answers = source.get_answers(cells)
        all_answers.update(new_answers)
        return new_answers

    report = advise.rank_strategies(workload, planned, arguments.gpus, arguments.nodes, arguments.precision, slowest, answers)
    for sentence in rehearsals.describe_refused(all_answers):
        out.print_remark(sentence, style="yellow")
    planner_table.print_advice(out, report)
    source_text = (
        "formula and rehearsal" if any(advice.predicted.memory_from == "rehearsal" for advice in report.ranked) else "formula"
    )
    out.print_remark(f"note: predictions by {source_text}, not calibrated by runs; docs/planner.md says how far to trust them.")
    out.print_document({"schema": 1, "strategies": report.ranked, "rules": report.rules})
    return 0


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
    )
    return _add_rehearsals(invocation, matrix_plan)


def _add_rehearsals(invocation: Invocation, planned: MatrixPlan) -> MatrixPlan:
    """The plan with predictions from the rehearsals that the workspace has; with --rehearse, missing rehearsals are made. A
    cell that cannot be rehearsed keeps its prediction by formula, and the reason is printed. Raises InputError."""
    answers = _make_rehearsals(invocation, planned.source.own).get_answers(planned.cells)
    if not answers:
        return planned
    for sentence in rehearsals.describe_refused(answers):
        invocation.out.print_remark(sentence, style="yellow")
    cells = [cell for cell in planned.cells if cell.name() in answers]
    predictions = plan_predictions.predict_cells(invocation.workspace, planned.source.where, cells, planned.recorded, answers)
    predicted = {**planned.predicted, **predictions}
    source = msgspec.structs.replace(planned.source, predicted=predicted)
    return msgspec.structs.replace(planned, predicted=predicted, source=source)


def _make_rehearsals(invocation: Invocation, plugins: OwnPlugins) -> Rehearsals:
    """The rehearsals of a command, by its options --rehearse and --full-depth. Raises InputError."""
    make, full_depth = (getattr(invocation.arguments, name, False) for name in ("rehearse", "full_depth"))
    if full_depth and not make:
        raise InputError("--full-depth: allowed only together with --rehearse.")
    return Rehearsals(invocation.workspace, plugins, invocation.out, make=make, full_depth=full_depth)


def keep_fitting_cells(invocation: Invocation, planned: MatrixPlan) -> MatrixPlan:
    """The plan without the cells that certainly do not fit the memory of a GPU. The name of each cell that is left out is
    printed. With --no-fit-check, the plan is returned unchanged."""
    if invocation.arguments.no_fit_check:
        return planned
    fitting, names = leave_out_cells_over_memory(planned)
    for name in names:
        needed, capacity = planned.predicted[name].memory_bytes, planned.predicted[name].capacity_bytes
        assert needed is not None
        assert capacity is not None
        invocation.out.print_remark(
            f"{name}: left out, because it needs at least {planner_table.format_size(needed.low)} of a GPU's "
            f"{planner_table.format_size(capacity.high)}. To submit it all the same: --no-fit-check.",
            style="yellow",
        )
    return fitting


def simulate_schedule(invocation: Invocation, planned: MatrixPlan) -> CellSchedule | None:
    """The simulated schedule of the cell that --schedule names; None if the option is not given. Raises InputError."""
    name: str | None = invocation.arguments.schedule
    if name is None:
        return None
    by_name = {cell.name(): cell for cell in planned.cells if cell.pp > 1}
    if not by_name:
        raise InputError(
            f"--schedule: no selected cell of {planned.matrix.name} has a pipeline. Allowed: cells with pp above 1."
        )
    if name not in by_name:
        raise UnknownName("cell with a pipeline", name, by_name, where="--schedule")
    return cell_schedule.make_schedule(by_name[name])


def scale_out_cells(invocation: Invocation, planned: MatrixPlan) -> dict[str, list[ScaledCell]] | None:
    """The predictions for each cell of a plan on the numbers of GPUs given by --scale-out, by the name of the cell; None if the
    option is not given. Raises InputError."""
    text: str | None = invocation.arguments.scale_out
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= MOST_GPUS for part in parts):
        raise InputError(f"--scale-out: found {text!r}. Allowed: numbers of GPUs from 1 to {MOST_GPUS}, such as 16,64,512.")
    cluster = planned.source.where
    earlier = plan_predictions.load_calibration(invocation.workspace)
    measured_all_reduces = inventory.read_all_reduces(invocation.workspace, cluster.name)
    scaled_by_name: dict[str, list[ScaledCell]] = {}
    for cell in planned.cells:
        gpus = cluster.for_gpu_type(cell.gpu_type).gpus
        per_node = (gpus.per_node if gpus is not None and gpus.per_node else None) or -(-cell.gpus // cell.nnodes)
        planned_machine = machine.plan_machine(cluster, cell.gpu_type, measured_all_reduces)
        scaled_cells = [scale_out.extrapolate(cell, int(part), per_node, planned_machine, earlier) for part in parts]
        scaled_by_name[cell.name()] = [scaled_cell for scaled_cell in scaled_cells if scaled_cell is not None]
    return scaled_by_name
