"""Resolves the points of a matrix (combinations of its values) into cells. Reports with file:line why a point is impossible."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Sequence
from socket import gethostname
from typing import Any

import msgspec

from jobs.launcher import Launcher, load_launchers
from jobs.planning import cell_limits, command_cells
from jobs.planning.cell_limits import AddProblem
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.errors import UnknownName
from shardlab.files.document import Problem
from shardlab.matrix import cell_sizes, claim_check, command
from shardlab.matrix.cell import AnyCell, Cell, Draft
from shardlab.matrix.matrix import Matrix, Point
from trainers.instruments import observed_steps
from trainers.strategy import Strategy
from trainers.workload import Workload


class Capacity(msgspec.Struct, frozen=True):
    """The machines that the scheduler can give to a run."""

    most_nodes: int | None
    """The largest number of nodes of a run; None: not known."""
    gpus_per_node: int | None
    """The number of GPUs of a node; None if ranks are processes on a CPU."""
    is_this_machine: bool = False
    """Whether runs start on this machine, so that it must have the programs of the launchers."""
    has_rank_tasks: bool = True
    """Whether the scheduler can start a task for each rank, and not only for each node."""
    limit_s: int | None = None
    """The largest time limit of a run, in seconds; None: not known."""
    has_slices: bool = False
    """Whether the GPUs are slices of GPUs (MIG)."""
    by_gpu_type: dict[str, Capacity] = {}
    """For each GPU type that a cell may name: the capacity for cells with this type."""
    environments: tuple[str, ...] = ()
    """The Python environments that a cell may name."""

    def for_gpu_type(self, gpu_type: str | None) -> Capacity | None:
        """The capacity for cells with this GPU type; None if the cluster has no such GPU type."""
        return self if gpu_type is None else self.by_gpu_type.get(gpu_type)


class Misfit(msgspec.Struct, frozen=True):
    """A cell that does not fit the machines."""

    cell_name: str
    """Its name."""
    why: str
    """The reason."""
    problem: Problem
    """The reason with the cell's place in the matrix file."""


class Menus(msgspec.Struct, frozen=True):
    """The strategies, workloads and launchers that a cell may name, by name."""

    strategies: dict[str, Strategy]
    workloads: dict[str, Workload]
    launchers: dict[str, Launcher]
    digest_by_command: dict[str, str] = {}
    """The digest of the folder of each command, by the name of the command."""
    faults_by_key: dict[str, dict[str, str]] = {}
    """Why a file of the workspace does not define a workload or strategy: by key (workload, strategy), then by name."""


def resolve_cells(matrix: Matrix, capacity: Capacity | None = None, plugins: OwnPlugins | None = None) -> list[AnyCell]:
    """The cells of a matrix, one for each point, in the order of the points.

    capacity: if given, a cell without the key nnodes gets the smallest number of the cluster's nodes that have enough GPUs for
    the cell. plugins: the plug-ins of the workspace.

    Raises InputError, which lists every problem with its place in the file.
    """
    plugins = plugins or OwnPlugins()
    faults_by_key = {"workload": plugins.workloads.fault_by_name, "strategy": plugins.strategies.fault_by_name}
    command_codes = {command_name: folder.digest for command_name, folder in plugins.command_folders.items()}
    menus = Menus(plugins.make_strategy_menu(), plugins.make_workload_menu(), load_launchers(), command_codes, faults_by_key)
    problems: list[Problem] = []
    baseline = matrix.file.baseline
    if baseline not in menus.strategies and baseline not in matrix.strategy_labels:
        unknown_sentence = str(UnknownName("strategy", baseline, menus.strategies))
        problem_sentence = plugins.strategies.fault_by_name.get(baseline, unknown_sentence)
        problems.append(matrix.document.problem(("baseline",), problem_sentence))
    cells: list[AnyCell] = []
    first_index_by_hash: dict[str, int] = {}
    for point_number, point in enumerate(matrix.points, start=1):
        cell = _resolve_cell(matrix, point, menus, problems, capacity)
        if cell is None:
            continue
        if cell.hash() in first_index_by_hash:
            problem_sentence = f"cells {first_index_by_hash[cell.hash()]} and {point_number} are the same run."
            problem_sentence += " Use `repeats` to run a cell more than once."
            problems.append(matrix.problem(point, next(reversed(point.keys)), problem_sentence))
        first_index_by_hash.setdefault(cell.hash(), point_number)
        cells.append(cell)
    if not problems:
        excluded_cells = [excluded_entry.cell for excluded_entry in matrix.excluded]
        problems = claim_check.find_claims_without_cells(matrix.document, matrix.file.claim_tests, cells, excluded_cells)
    if problems:
        raise matrix.document.errors(problems)
    return cells


def find_misfits(
    matrix: Matrix, cells: Sequence[AnyCell], cluster_capacity: Capacity, selected_cells: Sequence[AnyCell]
) -> list[Misfit]:
    """The cells of `selected_cells` that do not fit the machines. cells: all cells, in the order of the matrix's points."""
    misfits = []
    selected_names = {cell.name() for cell in selected_cells}
    for point, cell in zip(matrix.points, cells, strict=True):
        capacity = cluster_capacity.for_gpu_type(cell.gpu_type)
        reason_by_key = (
            {"gpu_type": _explain_gpu_type(cell, cluster_capacity)} if capacity is None else _explain_misfit(cell, capacity)
        )
        reason_by_key["environment"] = _explain_environment(cell, cluster_capacity)
        for key, misfit_reason in reason_by_key.items():
            if misfit_reason is not None and cell.name() in selected_names:
                misfits.append(Misfit(cell.name(), misfit_reason, matrix.problem(point, key, misfit_reason)))
    return misfits


def _explain_misfit(cell: AnyCell, capacity: Capacity) -> dict[str, str | None]:
    """Why a cell does not fit the machines: for each key that says what the cell needs, the reason, or None if the key fits."""
    return {
        "nnodes": _explain_too_few_nodes(cell, capacity),
        "gpus": _explain_too_few_gpus(cell, capacity),
        "launcher": explain_unusable_launcher(cell.launcher, capacity),
        "time_limit": _explain_long_time_limit(cell, capacity),
    }


def _resolve_cell(
    matrix: Matrix, point: Point, menus: Menus, problems: list[Problem], capacity: Capacity | None
) -> AnyCell | None:
    """Resolve one point into a cell. If the cell is not possible, append the reasons to `problems` and return None.

    capacity: as for `resolve_cells`.
    """
    problem_count = len(problems)

    def add_problem(key: str, sentence: str) -> None:
        problems.append(matrix.problem(point, key, sentence))

    workload_name = point.keys.get("workload")
    if isinstance(workload_name, str) and workload_name in matrix.command_by_name:
        gpus_per_node = _find_gpus_per_node(point.keys.get("gpu_type"), capacity)
        return command_cells.resolve_command_point(
            matrix, point, menus.launchers, menus.digest_by_command[workload_name], gpus_per_node, add_problem
        )
    draft = _check_draft(point, menus, add_problem)
    if draft is None:
        return None
    strategy, workload = menus.strategies[draft.strategy], menus.workloads[draft.workload]
    option_values = _fill_options(draft, strategy, workload, menus, add_problem)
    _check_supported_switches(draft, strategy, add_problem)
    for key, sentence in command_cells.find_variable_faults(draft).items():
        add_problem(key, sentence)
    for set_name in draft.set:
        add_problem(
            f"set.{set_name}", "is a value for the command of a user. Allowed: options.NAME, for a workload of shardlab."
        )
    degrees = _fill_degrees(draft, strategy, add_problem)
    limits_s = cell_limits.parse_limits(draft, add_problem)
    batch_sizes = _compute_batch_sizes(draft, workload, strategy, degrees, add_problem)
    if len(problems) > problem_count or batch_sizes is None:
        return None
    nnodes = draft.nnodes or cell_limits.count_fewest_nodes(
        draft, menus.launchers[draft.launcher], _find_gpus_per_node(draft.gpu_type, capacity)
    )
    cell = _assemble_cell(draft, strategy, workload, nnodes, degrees, batch_sizes, limits_s, option_values)
    if draft.nnodes is None and nnodes > 1 and strategy.refuse(cell) is not None:
        # If the cell is right on one node, the nodes are too small: it is a misfit of the cluster and no error of the matrix.
        one_node_cell = _assemble_cell(draft, strategy, workload, 1, degrees, batch_sizes, limits_s, option_values)
        cell = one_node_cell if strategy.refuse(one_node_cell) is None else cell
    _add_refusals(cell, strategy, workload, menus.launchers[draft.launcher], draft, add_problem)
    return cell if len(problems) == problem_count else None


def _find_gpus_per_node(gpu_type: str | None, capacity: Capacity | None) -> int | None:
    """The number of GPUs of a node of this type; None if it is not known. capacity: as for `resolve_cells`."""
    type_capacity = capacity.for_gpu_type(gpu_type) if capacity is not None else None
    return type_capacity.gpus_per_node if type_capacity is not None else None


def _check_draft(point: Point, menus: Menus, add_problem: AddProblem) -> Draft | None:
    """Check the types of a point's values. If a key is missing or a name is unknown, adds a problem and returns None."""
    try:
        draft = point.make_draft()
    except msgspec.ValidationError as validation_error:
        add_problem("workload", f"a cell is not complete: {str(validation_error)[0].lower()}{str(validation_error)[1:]}.")
        return None
    allowed_names_by_key: dict[str, Collection[str]] = {
        "strategy": menus.strategies,
        "workload": menus.workloads,
        "launcher": [launcher_name for launcher_name, launcher in menus.launchers.items() if launcher.starts_trainings],
    }
    fault_by_key = {
        key: fault for key, faults_by_name in menus.faults_by_key.items() if (fault := faults_by_name.get(getattr(draft, key)))
    }
    for key, fault in fault_by_key.items():
        add_problem(key, fault)
    if fault_by_key:
        return None
    unknown_keys = [key for key, allowed_names in allowed_names_by_key.items() if getattr(draft, key) not in allowed_names]
    for key in unknown_keys:
        add_problem(key, str(UnknownName(key, getattr(draft, key), allowed_names_by_key[key])))
    return None if unknown_keys else draft


def _assemble_cell(
    draft: Draft,
    strategy: Strategy,
    workload: Workload,
    nnodes: int,
    degree_by_name: dict[str, int],
    batch_sizes: tuple[int, int, int],
    limits_s: tuple[int | None, int],
    option_values: dict[str, Any],
) -> Cell:
    """The cell of a draft whose keys were all checked.

    degree_by_name: dp, tp and pp. batch_sizes: global_batch_size, micro_batch_size and gradient_accumulation_steps. limits_s:
    the time limit and the hang limit in seconds. option_values: the options of the strategy and the workload.
    """
    global_batch_size, micro_batch_size, pass_count = batch_sizes
    time_limit_s, hang_limit_s = limits_s
    unchanged_values = {key: getattr(draft, key) for key in Draft.__struct_fields__ if key in AnyCell.__struct_fields__}
    return Cell(
        **{
            **unchanged_values,
            **degree_by_name,
            "nnodes": nnodes,
            "servers": (draft.servers or 1) if strategy.servers else 0,
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "gradient_accumulation_steps": pass_count,
            "seq_len": draft.seq_len or workload.seq_len,
            "optimizer": draft.optimizer or workload.optimizer,
            "time_limit_s": time_limit_s,
            "hang_limit_s": hang_limit_s,
            "options": option_values,
            "env": command.format_variables(draft.env),
            "workload_code": workload.code,
            "strategy_code": strategy.code,
        }
    )


def _add_refusals(
    cell: Cell, strategy: Strategy, workload: Workload, launcher: Launcher, draft: Draft, add_problem: AddProblem
) -> None:
    """Add a problem for each reason why this cell cannot run. If the reason names an option that the file sets, the problem is
    reported at the place of this option."""
    for key, refusal in (
        ("workload", workload.refuse(cell)),
        ("strategy", strategy.refuse(cell)),
        ("nnodes", cell_limits.explain_uneven_ranks(cell, launcher)),
        *observed_steps.list_refusals(cell, cell.steps),
    ):
        if refusal is not None:
            named_options = [
                option_name
                for option_name in draft.options
                if refusal.startswith(f"{option_name}:") or f"({option_name})" in refusal
            ]
            add_problem(f"options.{named_options[0]}" if named_options else key, refusal)


def _fill_options(
    draft: Draft, strategy: Strategy, workload: Workload, menus: Menus, add_problem: AddProblem
) -> dict[str, Any]:
    """The options of the strategy and the workload, with the default value for each option that the draft does not set."""
    options_by_name = {option.name: option for option in (*strategy.options, *workload.options)}
    for option_name, option_value in draft.options.items():
        if option_name not in options_by_name:
            option_noun = f"option of {strategy.name} or {workload.name}"
            add_problem(
                f"options.{option_name}",
                str(UnknownName(option_noun, option_name, options_by_name)) + _suggest_condition(option_name, menus),
            )
        elif (refusal := options_by_name[option_name].explain_refused_value(option_value)) is not None:
            add_problem(f"options.{option_name}", refusal)
    return {option_name: draft.options.get(option_name, option.default) for option_name, option in options_by_name.items()}


def _suggest_condition(option_name: str, menus: Menus) -> str:
    """A sentence that shows how to set an option only for the cells whose strategy or workload has this option; '' if no
    strategy or workload has it."""
    for menu_key, menu_entries in (("strategy", menus.strategies), ("workload", menus.workloads)):
        if owner_names := [
            entry_name
            for entry_name, menu_entry in menu_entries.items()
            if option_name in {entry_option.name for entry_option in menu_entry.options}
        ]:
            example = f"include: [{{when: \"{menu_key} == '{owner_names[0]}'\", options: {{{option_name}: ...}}}}]"
            return (
                f" It is an option of {', '.join(owner_names)}; to give it only to cells of {owner_names[0]}, write {example}."
            )
    return ""


def _fill_degrees(draft: Draft, strategy: Strategy, add_problem: AddProblem) -> dict[str, int]:
    """The values of dp, tp and pp. If one value is missing, it is computed by division from the number of GPUs. A dimension
    that the strategy does not have gets 1."""
    given_degree_by_name = {"dp": draft.dp, "tp": draft.tp, "pp": draft.pp}
    for name, degree in given_degree_by_name.items():
        if name not in strategy.degrees and degree not in (None, 1):
            add_problem(name, f"{strategy.name} has no {name} dimension. Allowed: {', '.join(strategy.degrees)}.")
            return {"dp": draft.gpus, "tp": 1, "pp": 1}
    known_degrees = {name: given_degree_by_name[name] for name in strategy.degrees}
    missing_names = [name for name, degree in known_degrees.items() if degree is None]
    degree_product = math.prod(degree for degree in known_degrees.values() if degree is not None)
    if len(missing_names) > 1:
        add_problem("strategy", f"{strategy.name} on {draft.gpus} ranks needs a value for {' or '.join(missing_names[::-1])}.")
    elif draft.gpus % degree_product or (not missing_names and degree_product != draft.gpus):
        degrees_text = " x ".join(f"{name}: {degree}" for name, degree in known_degrees.items() if degree is not None)
        add_problem(
            next(name for name, degree in known_degrees.items() if degree is not None),
            f"{degrees_text} does not match {draft.gpus} ranks.",
        )
    else:
        known_degrees |= dict.fromkeys(missing_names, draft.gpus // degree_product)
    return {name: known_degrees.get(name) or 1 for name in given_degree_by_name}


def _check_supported_switches(draft: Draft, strategy: Strategy, add_problem: AddProblem) -> None:
    """Add a problem for each switch that the strategy does not support. If such a switch were ignored, the cells that are
    compared would not do the same work."""
    use_by_switch = {
        "activation_checkpointing": draft.activation_checkpointing != "none",
        "compile": draft.compile,
        "max_grad_norm": draft.max_grad_norm is not None,
    }
    for switch in (switch for switch, is_used in use_by_switch.items() if is_used and switch not in strategy.switches):
        add_problem(switch, f"{strategy.name} does not support {switch}. Allowed: leave {switch} out.")
    if draft.activation_checkpointing.startswith("segments-") and strategy.degrees != ("dp",):
        add_problem(
            "activation_checkpointing",
            f"{strategy.name} splits the model over ranks, so segments are not possible. Allowed: none, full, every-K.",
        )
    if draft.instruments.checkpoints is not None and strategy.no_checkpoints:
        refusal = f"{strategy.name} keeps no checkpoints: {strategy.no_checkpoints}"
        add_problem("instruments.checkpoints", f"{refusal}. Allowed: leave instruments.checkpoints out.")
    if draft.servers is not None and not strategy.servers:
        add_problem("servers", f"{strategy.name} has no parameter servers. Allowed: leave servers out.")


def _compute_batch_sizes(
    draft: Draft, workload: Workload, strategy: Strategy, degree_by_name: dict[str, int], add_problem: AddProblem
) -> tuple[int, int, int] | None:
    """Check the lengths, the instruments and the precision of a draft, then compute its batch sizes.

    Returns (global_batch_size, micro_batch_size, gradient_accumulation_steps); if the sizes are not possible, adds a problem
    and returns None.
    """
    if (draft.steps is None) == (draft.epochs is None):
        found_keys = "neither" if draft.steps is None else "both"
        add_problem("steps", f"exactly one of steps and epochs is needed, found {found_keys}.")
    if draft.seq_len is not None and workload.seq_len is None:
        add_problem("seq_len", f"{workload.name} has no sequences. Allowed: leave seq_len out.")
    for key, interval in (("validation", draft.instruments.validation), ("checkpoints", draft.instruments.checkpoints)):
        if interval is not None and (interval.every_steps is None) == (interval.every_epochs is None):
            found_keys = "neither" if interval.every_steps is None else "both"
            add_problem(f"instruments.{key}", f"exactly one of every_steps and every_epochs is needed, found {found_keys}.")
    if (refusal := strategy.refuse_precision(draft.precision)) is not None:
        add_problem("precision", refusal)
    try:
        return cell_sizes.compute_batch_sizes(draft, degree_by_name["dp"])
    except cell_sizes.BatchError as batch_error:
        add_problem(batch_error.key, str(batch_error))
        return None


def explain_unusable_launcher(name: str, capacity: Capacity) -> str | None:
    """Why a launcher cannot start ranks on these machines; None if it can. name: its name."""
    launcher_by_name = load_launchers()
    if not capacity.is_this_machine:
        if capacity.has_rank_tasks or not launcher_by_name[name].has_rank_tasks:
            return None
        starts_trainings = launcher_by_name[name].starts_trainings
        other_launchers = (other for other in launcher_by_name.values() if not other.has_rank_tasks)
        other_names = ", ".join(other.name for other in other_launchers if other.starts_trainings or not starts_trainings)
        return f"the launcher {name} starts its ranks by Slurm, which the cluster does not have. Allowed: {other_names}."
    missing_programs = [program for program in launcher_by_name[name].needed_programs if shutil.which(program) is None]
    if not missing_programs:
        return None
    is_or_are = "is" if len(missing_programs) == 1 else "are"
    programs_clause = f"{' and '.join(missing_programs)}, which {is_or_are} not installed on {gethostname()}"
    return f"the launcher {name} needs {programs_clause}. Install what is missing, or choose another launcher."


def _explain_too_few_nodes(cell: AnyCell, capacity: Capacity) -> str | None:
    if capacity.most_nodes is None or cell.nnodes <= capacity.most_nodes:
        return None
    return f"needs {cell.nnodes} nodes, the cluster has {capacity.most_nodes}."


def _explain_gpu_type(cell: AnyCell, cluster_capacity: Capacity) -> str | None:
    if not cluster_capacity.by_gpu_type:
        return f"names the GPU type {cell.gpu_type}, but the cluster file names no type. Allowed: leave gpu_type out."
    return str(UnknownName("GPU type of the cluster", str(cell.gpu_type), cluster_capacity.by_gpu_type))


def _explain_environment(cell: AnyCell, cluster_capacity: Capacity) -> str | None:
    if cell.environment is None or cell.environment in cluster_capacity.environments:
        return None
    if not cluster_capacity.environments:
        return f"names the environment {cell.environment}, but the cluster file has no environments. Allowed: leave it out."
    return str(UnknownName("environment of the cluster", cell.environment, cluster_capacity.environments))


def _explain_long_time_limit(cell: AnyCell, capacity: Capacity) -> str | None:
    if capacity.limit_s is None or cell.time_limit_s is None or cell.time_limit_s <= capacity.limit_s:
        return None
    return f"has a time limit of {cell.time_limit_s} s, the partition allows {capacity.limit_s} s."


def _explain_too_few_gpus(cell: AnyCell, capacity: Capacity) -> str | None:
    if capacity.has_slices and cell.launcher != "fork" and cell.gpus > 1:
        slices_clause = "the cluster's GPUs are slices of GPUs (MIG), between which ranks cannot communicate"
        return f"needs {cell.gpus} GPUs, but {slices_clause}. Allowed: cells with one GPU."
    if capacity.gpus_per_node is not None and cell.launcher != "fork" and cell.gpus > capacity.gpus_per_node * cell.nnodes:
        return f"needs {cell.gpus} GPUs, the cluster has {capacity.gpus_per_node} per node."
    return None
