"""Plans a matrix on a cluster and writes nothing: lists its cells, its runs, and the cells that do not fit the cluster."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from jobs import on_controller
from jobs.launcher import find_launcher
from jobs.planner import gpu, predict
from jobs.planner.machine import PRACTICE_GPU
from jobs.planning import batch_searches, command_cells, gpu_hours, plan_predictions, tiny_twin
from jobs.planning import repeats as number_of_runs
from jobs.planning.gpu_hours import CellHours
from jobs.planning.repeats import EstimatedCost
from jobs.planning.resolve import Capacity, Misfit, find_misfits, resolve_cells
from jobs.plugins import command_folder, own_plugins
from jobs.plugins.own_plugins import OwnPlugins
from jobs.rendering import frozen_source, python_environment, render
from jobs.slurm import allocation, share
from jobs.slurm.share import AccountShare
from jobs.status.reconcile import Status, find_blocking_status
from jobs.status.select import is_true_for_cell, parse_condition
from shardlab import extras
from shardlab.cluster import login_node
from shardlab.cluster.cluster import THIS_MACHINE, Cluster
from shardlab.cluster.slurm_cluster import choose_slurm_cluster
from shardlab.cluster.slurm_keys import Gpus
from shardlab.errors import InputError, MissingExtra
from shardlab.hardware import host
from shardlab.matrix import batch_search, gradient_sync, matrix
from shardlab.matrix.cell import AnyCell, select_trainings
from shardlab.matrix.matrix import Matrix
from shardlab.runs.prediction import Prediction
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.runs.rundir import RunDir
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace
from trainers import menu

SCALES = ("full", "tiny")
ADAPT_HINT = (
    "--adapt uses fewer GPUs where cells do not fit, and lists every change of the matrix (docs/how-to/fit-a-matrix.md)."
)


class MatrixPlan(msgspec.Struct, frozen=True):
    """The plan of a matrix on a cluster."""

    matrix: Matrix
    """The matrix file."""
    all_cells: list[AnyCell]
    """All cells of the matrix."""
    cells: list[AnyCell]
    """The cells that --where selects; all cells without --where."""
    repeats_by_cell: dict[str, int]
    """The number of runs of each cell of `all_cells`, by the name of the cell."""
    recorded_s: dict[str, float]
    """The mean duration of completed runs in seconds, by the name of the cell."""
    estimated_cost: EstimatedCost
    """The estimated time of the runs of `cells`, as far as it is known."""
    context: render.RenderContext
    """What all runs of the plan have in common."""
    remarks: list[str]
    """Notes for the user."""
    misfits: list[Misfit]
    """The `cells` that do not fit the machines of the cluster, each with its place in the matrix file."""
    fit_advice: list[str]
    """Sentences that name the options with which all selected cells may fit."""
    predictions: dict[str, Prediction]
    """The planner's prediction for each cell of `cells`, by the name of the cell."""

    def find_planned_name(self, cell: AnyCell) -> str:
        """The name of the planned cell to which a run of `cell` belongs. For a try of a search, this is the cell of the first
        try."""
        search = self.context.find_search(cell)
        return (cell if search is None else batch_search.try_cell(cell.require_training(), search.start)).name()

    def count_most_runs(self, run_counts: Mapping[str, int]) -> dict[str, int]:
        """The largest number of runs of each selected cell, by the name of the cell; each search counts with all its tries.
        run_counts: the number of runs or searches of each cell, by the name of the cell."""
        most_tries = {
            cell.name(): search.most_tries for cell in self.cells if (search := self.context.find_search(cell)) is not None
        }
        return {cell_name: run_count * most_tries.get(cell_name, 1) for cell_name, run_count in run_counts.items()}


def plan_matrix(
    workspace: Workspace,
    matrix_name: str,
    cluster: Cluster,
    *,
    where: str | None,
    repeats: int | None,
    scale: str = "full",
    wait_gpus_s: int = 0,
    in_allocation: bool = False,
    track: str | None = None,
    settings: Sequence[str] = (),
) -> MatrixPlan:
    """Read, check and resolve a matrix on a cluster. No run folder is written. Raises InputError.

    matrix_name: the name of a shipped matrix, or the path of a matrix file. where: the expression of --where, for the cells of
    the file also with scale `tiny`. repeats: the runs of each cell; None: as the matrix says. scale: `full` or `tiny`.
    wait_gpus_s, track: as in `Run`. in_allocation: whether runs start in this process's Slurm allocation. settings: of --set.
    """
    if repeats is not None and not 1 <= repeats <= 1000:
        raise InputError(f"--repeats: found {repeats}. Allowed: 1 to 1000.")
    requested_matrix = matrix.load_matrix(matrix.find_matrix_file(matrix_name), settings)
    file, capacity = requested_matrix.file, find_cluster_capacity(cluster, in_allocation=in_allocation)
    plugins = find_own_plugins(workspace, requested_matrix, cluster)
    stored_name = requested_matrix.name if scale == "full" else f"{requested_matrix.name}-{scale}"
    try:
        cells = _resolve_at_scale(requested_matrix, capacity, plugins, scale)
        searches = batch_searches.plan_searches(workspace, requested_matrix, cells, cluster, stored_name, plugins)
        cells = searches.first_try_cells
    finally:
        plugins.close()
    selected_cells = _select_cells(cells, where)
    misfits = find_misfits(requested_matrix, cells, capacity, selected_cells)
    render_context = render.make_render_context(
        stored_name, cluster, workspace, wait_gpus_s=wait_gpus_s, in_allocation=in_allocation, track=track, plugins=plugins
    )
    repeats_by_cell = number_of_runs.count_repeats(file, cells, repeats)
    rehearsed_names = {cell.name() for cell in selected_cells if render_context.plans_rehearsal(cell)}
    recorded_s_by_cell = number_of_runs.compute_mean_recorded_s(workspace, selected_cells, repeats_by_cell, rehearsed_names)
    predictions = plan_predictions.predict_cells(workspace, cluster, selected_cells, recorded_s_by_cell)
    remarks = command_cells.describe_commands(requested_matrix, cells)
    remarks += command_folder.describe_folders(plugins.command_folders)
    remarks += _make_plan_remarks(selected_cells, capacity, cluster, len(rehearsed_names))
    remarks += python_environment.explain_missing(workspace, cluster, {cell.environment or "" for cell in selected_cells})
    advice = suggest_options(requested_matrix, cells, selected_cells, capacity, where, plugins) if misfits else []
    return MatrixPlan(
        matrix=requested_matrix,
        all_cells=cells,
        cells=selected_cells,
        repeats_by_cell=repeats_by_cell,
        recorded_s=recorded_s_by_cell,
        estimated_cost=number_of_runs.estimate_cost(selected_cells, repeats_by_cell, recorded_s_by_cell),
        context=msgspec.structs.replace(
            render_context, predictions=predictions, search_by_family=searches.search_by_family, retry=file.retry
        ),
        remarks=[*remarks, *render.list_own_file_remarks(render_context)],
        misfits=misfits,
        fit_advice=[*advice, ADAPT_HINT] if misfits else [],
        predictions=predictions,
    )


def _resolve_at_scale(requested_matrix: Matrix, capacity: Capacity, plugins: OwnPlugins, scale: str) -> list[AnyCell]:
    """The cells of a matrix, or their tiny twins. capacity: the machines that the cluster gives to a run. Raises InputError."""
    cells = resolve_cells(requested_matrix, capacity=None if capacity.is_this_machine else capacity, plugins=plugins)
    if scale != "tiny":
        return cells
    twins = tiny_twin.make_twins(cells, plugins.make_workload_menu())
    tiny_twin.must_train(twins)
    return [*twins]


def _select_cells(cells: list[AnyCell], where: str | None) -> list[AnyCell]:
    """The cells for which the expression of --where is true; all if it is None. Raises InputError if there is none."""
    selected_cells = [cell for cell in cells if where is None or is_true_for_cell(parse_condition(where), cell)]
    if not selected_cells:
        raise InputError(f"--where {where!r} selects none of the {len(cells)} cells.")
    return selected_cells


def find_own_plugins(workspace: Workspace, requested_matrix: Matrix, cluster: Cluster = THIS_MACHINE) -> OwnPlugins:
    """The plug-ins of the workspace that a matrix names. The code of a workload is executed in the environment of its cells, if
    this machine has the environment: only there may the packages be installed that the code imports."""
    ordered_points = sorted(requested_matrix.points, key=lambda point: "environment" in point.keys)  # the last one decides
    environment_by_workload = {str(point.keys.get("workload")): point.keys.get("environment") for point in ordered_points}
    interpreter_by_workload = {
        workload_name: interpreter
        for workload_name, environment in environment_by_workload.items()
        if (interpreter := python_environment.find_interpreter(workspace, cluster, environment)) is not None
    }
    workload_names = {str(point.keys.get("workload")) for point in requested_matrix.points}
    model_by_workload = {
        workload_name: model for workload_name, model in requested_matrix.models.items() if workload_name in workload_names
    }
    command_folders = command_folder.read_folders(requested_matrix, workspace)
    strategy_names = {requested_matrix.file.baseline, *(str(point.keys.get("strategy")) for point in requested_matrix.points)}
    plugin_names = workload_names - model_by_workload.keys() - command_folders.keys()
    strategy_names -= requested_matrix.strategy_labels
    plugins = own_plugins.find_plugins(workspace, plugin_names, strategy_names, model_by_workload, interpreter_by_workload)
    plugins = msgspec.structs.replace(plugins, command_folders=command_folders)
    for workload_name in environment_by_workload.keys() & plugins.workloads.fault_by_name - interpreter_by_workload.keys():
        if environment_by_workload[workload_name] is not None:
            plugins.workloads.fault_by_name[workload_name] += (
                f" It was not executed in the environment {environment_by_workload[workload_name]}: not ready here."
            )
    return plugins


def find_cluster_capacity(cluster: Cluster, *, in_allocation: bool = False) -> Capacity:
    """The machines that the cluster can give to a run. in_allocation: whether runs start in the Slurm allocation of this
    process. Raises InputError if `in_allocation` is set for a cluster without Slurm."""
    if in_allocation:
        if cluster.slurm is None:
            raise InputError(
                f"--in-allocation: the cluster {cluster.name} has no `slurm`. Allowed: a cluster file with `slurm`."
            )
        return msgspec.structs.replace(_find_allocation_capacity(cluster), environments=tuple(cluster.environments))
    capacity_by_type = {gpu_type: _find_gpu_type_capacity(cluster.select_gpu_type(gpu_type)) for gpu_type in cluster.gpu_types}
    return msgspec.structs.replace(
        _find_gpu_type_capacity(cluster), by_gpu_type=capacity_by_type, environments=tuple(cluster.environments)
    )


def _find_allocation_capacity(cluster: Cluster) -> Capacity:
    """The capacity of the Slurm allocation in which this process runs.

    The type of its GPUs is not checked: cells may name any GPU type of the cluster file.
    """
    own_allocation = allocation.read_own_allocation()
    allocation_capacity = Capacity(
        most_nodes=own_allocation.node_count,
        gpus_per_node=own_allocation.gpus_per_node if cluster.gpus is not None and cluster.gpus.per_node else None,
    )
    return msgspec.structs.replace(allocation_capacity, by_gpu_type=dict.fromkeys(cluster.gpu_types, allocation_capacity))


def _find_gpu_type_capacity(cluster: Cluster) -> Capacity:
    node_gpus = cluster.gpus.per_node or None if cluster.gpus else None
    if cluster.slurm is not None:
        node_limits = [cluster.slurm.max_nodes, None if cluster.provider == "slurm" else _count_workers(cluster)]
        most_nodes = min((node_limit for node_limit in node_limits if node_limit is not None), default=None)
        has_slices = cluster.gpus is not None and cluster.gpus.are_slices
        return Capacity(most_nodes=most_nodes, gpus_per_node=node_gpus, limit_s=cluster.slurm.max_time_s, has_slices=has_slices)
    if cluster.provider != "local":
        return Capacity(most_nodes=_count_workers(cluster), gpus_per_node=node_gpus, has_rank_tasks=False)
    observed_host = host.read_host()
    return Capacity(most_nodes=1, gpus_per_node=len(observed_host.gpus) if observed_host.gpus else None, is_this_machine=True)


def _count_workers(cluster: Cluster) -> int:
    """The number of nodes that train; before an experiment of CloudLab exists, the number that will be requested."""
    if cluster.cloudlab is not None and not cluster.nodes:
        return cluster.cloudlab.nodes
    return len(cluster.list_with_role("worker"))


def estimate_hours(plan: MatrixPlan, run_count_by_cell: Mapping[str, int]) -> list[CellHours]:
    """The GPU hours of each selected cell; empty if ranks are processes on the CPU.

    run_count_by_cell: the number of runs of each cell, by the name of the cell.
    """
    cluster = plan.context.cluster
    if cluster.provider == "local" and not host.read_host().gpus:
        return []
    on_slurm = plan.context.scheduler == "slurm"
    requeues = cluster.slurm.requeue if cluster.slurm is not None and on_slurm else 0
    retry = plan.matrix.file.retry
    most_retries = {cell.name(): gpu_hours.count_most_retries(cell, retry, requeues, on_slurm=on_slurm) for cell in plan.cells}
    # The tries of a search have larger batches than the first try, of which the prediction is.
    prediction_by_cell = {} if plan.context.search_by_family else plan.predictions
    return gpu_hours.estimate_cell_hours(
        plan.cells, plan.count_most_runs(run_count_by_cell), plan.recorded_s, prediction_by_cell, cluster, most_retries
    )


def read_account_shares(plan: MatrixPlan, workspace: Workspace) -> list[AccountShare]:
    """How much the user's Slurm account may still use under its limits; empty if Slurm does not report this, or if asking Slurm
    would need a login."""
    cluster = plan.context.cluster
    if cluster.slurm is None:
        return []
    if on_controller.starts_runs_here(cluster):
        return share.read_shares(cluster.slurm.account, choose_slurm_cluster(cluster))
    if cluster.login is None or not inventory.inventory_path(workspace).exists():
        return []
    login_address, _ = inventory.find_controller(workspace, cluster)
    return share.read_shares_over_ssh(login_address, cluster.slurm.account, cluster.slurm.cluster)


def leave_out_cells_over_memory(plan: MatrixPlan) -> tuple[MatrixPlan, list[str]]:
    """Leave out the cells that, according to their prediction, certainly do not fit the memory of a GPU.

    Returns (the plan without these cells, the names of these cells).
    """
    left_out_names = predict.list_names_over_memory(
        {cell.name(): cell for cell in select_trainings(plan.cells)}, plan.predictions
    )
    fitting_cells = [cell for cell in plan.cells if cell.name() not in left_out_names]
    fitting_cost = number_of_runs.estimate_cost(fitting_cells, plan.repeats_by_cell, plan.recorded_s)
    return msgspec.structs.replace(plan, cells=fitting_cells, estimated_cost=fitting_cost), left_out_names


def must_fit_cluster(plan: MatrixPlan) -> None:
    """Raises InputError if a selected cell does not fit the cluster, or if it has no GPUs that can run it. The error lists all
    cells that do not fit, and the options that leave them out."""
    for entry in _list_gpu_entries(plan.cells, plan.context.cluster):
        gpu_model = gpu.find_gpu_model(entry.type or "")
        if gpu_model is not None and not gpu_model.runs_cuda:
            raise InputError(f"gpus.type: found {entry.type}. Runs need NVIDIA GPUs; for other GPUs there is only `jobs plan`.")
    if plan.misfits:
        cluster_problems = plan.matrix.document.errors([misfit.problem for misfit in plan.misfits])
        raise InputError("\n".join([str(cluster_problems), *plan.fit_advice]))


def _list_gpu_entries(cells: Sequence[AnyCell], cluster: Cluster) -> list[Gpus]:
    """The entries of the cluster file for the GPUs of cells, without those that name no GPU type."""
    gpu_entries = [cluster.select_gpu_type(gpu_type).gpus for gpu_type in sorted({cell.gpu_type or "" for cell in cells})]
    return [entry for entry in gpu_entries if entry is not None and entry.type is not None]


def suggest_options(
    requested_matrix: Matrix,
    cells: Sequence[AnyCell],
    selected_cells: Sequence[AnyCell],
    capacity: Capacity,
    where: str | None,
    plugins: OwnPlugins | None = None,
) -> list[str]:
    """Sentences with options under which all cells fit: an expression for --where that selects exactly the cells that fit, and
    --scale tiny.

    requested_matrix: the matrix. cells: all cells of the matrix. selected_cells: the cells that `where` selects. capacity: the
    capacity of the cluster. where: the expression of --where. plugins: the plug-ins of the workspace."""
    misfit_names = {misfit.cell_name for misfit in find_misfits(requested_matrix, cells, capacity, selected_cells)}
    fitting_cells = [cell for cell in selected_cells if cell.name() not in misfit_names]
    sentences = []
    cells_by_expression = {
        candidate: [cell for cell in selected_cells if is_true_for_cell(parse_condition(candidate), cell)]
        for candidate in _list_limit_expressions(capacity)
    }
    expression = next((candidate for candidate, cells_left in cells_by_expression.items() if cells_left == fitting_cells), None)
    if fitting_cells and expression:
        combined_expression = f"({where}) and {expression}" if where else expression
        quoted_expression = (
            shlex.quote(combined_expression) if set(combined_expression) & set('"$`\\!') else f'"{combined_expression}"'
        )
        sentences.append(
            f"{len(fitting_cells)} of {len(selected_cells)} cells fit this cluster: --where {quoted_expression} "
            "leaves only those."
        )
    with contextlib.suppress(InputError):  # raised if a workload has no tiny twin
        if selected_cells[0].rehearses is None and not find_misfits(
            requested_matrix,
            (twin_cells := tiny_twin.make_twins(cells, (plugins or OwnPlugins()).make_workload_menu())),
            capacity,
            twin_cells,
        ):
            sentences.append("--scale tiny rehearses every cell at a tiny size, with its ranks on the CPU of one machine.")
    return sentences


def _list_limit_expressions(capacity: Capacity) -> list[str]:
    """Expressions for --where that may select exactly the cells that fit the machines, the simplest expression first."""
    nodes = capacity.most_nodes
    node_expression = "nnodes >= 1" if nodes is None else "nnodes == 1" if nodes == 1 else f"nnodes <= {nodes}"
    expressions = [node_expression]
    if capacity.gpus_per_node is not None:
        gpu_expressions = [f"gpus <= {capacity.gpus_per_node}", f"gpus <= {capacity.gpus_per_node} * nnodes"]
        gpu_expressions.append(f"(launcher == 'fork' or {gpu_expressions[-1]})")
        expressions += [*gpu_expressions, *(f"{node_expression} and {condition}" for condition in gpu_expressions)]
    type_condition = " or ".join(f"gpu_type == {gpu_type!r}" for gpu_type in (None, *capacity.by_gpu_type))
    return [*expressions, f"({type_condition})", *(f"({type_condition}) and {condition}" for condition in expressions)]


def must_run_here(context: render.RenderContext, *, allow_login_node: bool, has_training: bool = True) -> None:
    """If the runs start on this machine, check that this machine can run them.

    allow_login_node: whether --here is given, which allows a login node. has_training: whether a run trains; the others analyse
    traces. Raises InputError if this machine is a login node of a Slurm cluster, and MissingExtra if a package is not
    installed."""
    if context.scheduler != "local":
        return
    login_node.refuse_login_node(here_option=allow_login_node)
    purpose, module_names = ("training", ("torch",)) if has_training else ("the analysis of traces", ("numpy", "zlib_ng"))
    for module_name in module_names:
        if find_spec(module_name) is None:
            raise MissingExtra(f"{purpose} on this machine", module_name)


class RenderedRuns(msgspec.Struct, frozen=True):
    """The result of `jobs render`."""

    run_folders: list[RunDir]
    """The run folders that were written."""
    skipped_statuses: list[Status]
    """The runs that were skipped, because their records do not tell whether the runs were submitted."""


def store_source_in(plan: MatrixPlan, source_folder: Path) -> MatrixPlan:
    """The plan, changed so that the copy of shardlab's source is stored in `source_folder` instead of the workspace."""
    render_context = msgspec.structs.replace(plan.context, source=str(source_folder / Path(plan.context.source).name))
    return msgspec.structs.replace(plan, context=render_context)


def render_all(plan: MatrixPlan, workspace: Workspace, runs_dir: Path) -> RenderedRuns:
    """Write a run folder for every repeat of every selected cell into the folder `runs_dir`. The folder of a run that was
    submitted already is not changed."""
    run_folders, skipped_statuses = [], []
    frozen_source.freeze_source(Path(plan.context.source))
    own_plugins.freeze_plugins(workspace, plan.context.plugins)
    for cell, repeat in number_of_runs.order_runs_by_repeat(plan.cells, plan.repeats_by_cell):
        run = render.make_run(cell, repeat, 1, plan.context)
        existing_run = RunDir(runs_dir / run.run_id)
        if existing_run.path.exists():
            if (blocking_status := find_blocking_status(existing_run)) is not None:
                skipped_statuses.append(blocking_status)
                continue
            if existing_run.judge().state != "planned":
                continue
        run_folders.append(render.write_run_folder(run, runs_dir, plan.context))
    return RenderedRuns(run_folders, skipped_statuses)


def _make_plan_remarks(cells: Sequence[AnyCell], capacity: Capacity, cluster: Cluster, rehearsal_count: int) -> list[str]:
    remarks = tiny_twin.describe_dropped_settings([cell.rehearses for cell in select_trainings(cells) if cell.rehearses])
    processor_count = host.count_usable_processors()
    most_ranks = max(cell.gpus for cell in cells)
    if cluster.provider != "local":
        for launcher_name in sorted({cell.launcher for cell in cells if find_launcher(cell.launcher).needed_programs}):
            programs = " and ".join(find_launcher(launcher_name).needed_programs)
            remarks.append(f"the launcher {launcher_name} needs {programs} on each node; `jobs plan` cannot check the nodes.")
    if cluster.provider == "virtual" or any(entry.type == PRACTICE_GPU for entry in _list_gpu_entries(cells, cluster)):
        remarks.append("practice nodes: their GPUs exist only in Slurm; every rank is a process on this machine's CPU.")
    else:
        gpu_remarks = [gpu.explain_gpu_name(entry.type or "", entry.memory_gib) for entry in _list_gpu_entries(cells, cluster)]
        remarks += [sentence for sentence in gpu_remarks if sentence is not None]
    if cluster.provider != "virtual" and capacity.gpus_per_node is None and not capacity.by_gpu_type:
        remarks.append(
            f"no GPU {'here' if capacity.is_this_machine else 'in the cluster file'}: every rank is a process on the CPU."
        )
        if capacity.is_this_machine and most_ranks > processor_count:
            remarks.append(f"up to {most_ranks} ranks share {processor_count} processors: the measured times say little.")
    if capacity.is_this_machine and find_spec("torch") is None:
        install_command = extras.make_install_command("trainers")
        remarks.append(f"torch is not installed here; before `jobs submit` on this machine, install it with: {install_command}")
    accumulating_cells = [cell for cell in select_trainings(cells) if cell.gradient_accumulation_steps > 1]
    sync_by_strategy = ((cell.strategy, menu.find_strategy_of_cell(cell).sync(cell)) for cell in accumulating_cells)
    remarks += filter(None, [gradient_sync.describe_sync_difference(sync_by_strategy)])
    if rehearsal_count:
        cells_text = "every cell is" if rehearsal_count == len(cells) else f"{rehearsal_count} of {len(cells)} cells are"
        remarks.append(f"{cells_text} a {REHEARSAL_NOTE}.")
    return remarks
