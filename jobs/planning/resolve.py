"""Resolves the points of a matrix (combinations of its values) into cells. Reports with file:line why a point is impossible."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Sequence
from socket import gethostname
from typing import Any

import msgspec

from jobs.launcher import Launcher, launchers
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.errors import UnknownName
from shardlab.files.document import Problem
from shardlab.matrix import cell_sizes, claim_check
from shardlab.matrix.cell import Cell, Draft
from shardlab.matrix.matrix import Matrix, Point
from trainers.instruments import observed_steps
from trainers.strategy import Strategy
from trainers.workload import Workload

AddProblem = Callable[[str, str], None]  # adds a problem of a cell; arguments: the key of the matrix, and a sentence


class Capacity(msgspec.Struct, frozen=True):
    """The machines that the scheduler can give to a run."""

    nodes: int | None
    """The largest number of nodes of a run; None: not known."""
    gpus: int | None
    """The number of GPUs of a node; None if ranks are processes on a CPU."""
    here: bool = False
    """Whether runs start on this machine, so that it must have the programs of the launchers."""
    per_rank: bool = True
    """Whether the scheduler can start a task for each rank, and not only for each node."""
    longest_s: int | None = None
    """The largest time limit of a run, in seconds; None: not known."""
    has_slices: bool = False
    """Whether the GPUs are slices of GPUs (MIG)."""
    types: dict[str, Capacity] = {}
    """For each GPU type that a cell may name: the capacity for cells with this type."""
    environments: tuple[str, ...] = ()
    """The Python environments that a cell may name."""

    def for_gpu_type(self, gpu_type: str | None) -> Capacity | None:
        """The capacity for cells with this GPU type; None if the cluster has no such GPU type."""
        return self if gpu_type is None else self.types.get(gpu_type)


class Misfit(msgspec.Struct, frozen=True):
    """A cell that does not fit the machines."""

    cell: str
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
    faults: dict[str, dict[str, str]] = {}
    """Why a file of the workspace does not define a workload or strategy: by key (workload, strategy), then by name."""


def resolve_cells(
    matrix: Matrix, machine: Capacity | None = None, cluster: Capacity | None = None, plugins: OwnPlugins | None = None
) -> list[Cell]:
    """The cells of a matrix, one for each point, in the order of the points.

    machine: if given, all cells must fit this capacity. cluster: if given, a cell without the key nnodes gets the smallest
    number of the cluster's nodes that have enough GPUs for the cell. plugins: the plug-ins of the workspace.

    Raises InputError, which lists every problem with its place in the file.
    """
    plugins = plugins or OwnPlugins()
    faults = {"workload": plugins.workloads.faults, "strategy": plugins.strategies.faults}
    menus = Menus(plugins.strategy_menu(), plugins.workload_menu(), launchers(), faults)
    problems: list[Problem] = []
    if matrix.file.baseline not in menus.strategies:
        unknown = str(UnknownName("strategy", matrix.file.baseline, menus.strategies))
        text = plugins.strategies.faults.get(matrix.file.baseline, unknown)
        problems.append(matrix.document.problem(("baseline",), text))
    cells: list[Cell] = []
    first: dict[str, int] = {}
    for number, point in enumerate(matrix.points, start=1):
        cell = _resolve_cell(matrix, point, menus, problems, cluster)
        if cell is None:
            continue
        if cell.hash() in first:
            text = f"cells {first[cell.hash()]} and {number} are the same run. Use `repeats` to run a cell more than once."
            problems.append(matrix.problem(point, next(reversed(point.keys)), text))
        first.setdefault(cell.hash(), number)
        cells.append(cell)
    if not problems:
        excluded = [entry.cell for entry in matrix.excluded]
        problems = claim_check.find_claims_without_cells(matrix.document, matrix.file.claim_tests, cells, excluded)
    if problems:
        raise matrix.document.errors(problems)
    if machine is not None and (found_misfits := find_misfits(matrix, cells, machine, cells)):
        raise matrix.document.errors([misfit.problem for misfit in found_misfits])
    return cells


def find_misfits(matrix: Matrix, cells: Sequence[Cell], machine: Capacity, selected_cells: Sequence[Cell]) -> list[Misfit]:
    """The cells of `selected_cells` that do not fit the machines. cells: all cells, in the order of the matrix's points."""
    found_misfits = []
    names = {cell.name() for cell in selected_cells}
    for point, cell in zip(matrix.points, cells, strict=True):
        capacity = machine.for_gpu_type(cell.gpu_type)
        reasons = {"gpu_type": _why_gpu_type_unknown(cell, machine)} if capacity is None else _explain_misfit(cell, capacity)
        reasons["environment"] = _why_environment_unknown(cell, machine)
        for key, why in reasons.items():
            if why is not None and cell.name() in names:
                found_misfits.append(Misfit(cell.name(), why, matrix.problem(point, key, why)))
    return found_misfits


def _explain_misfit(cell: Cell, machine: Capacity) -> dict[str, str | None]:
    """Why a cell does not fit the machines: for each key that says what the cell needs, the reason, or None if the key fits."""
    return {
        "nnodes": _why_too_few_nodes(cell, machine),
        "gpus": _why_too_few_gpus(cell, machine),
        "launcher": why_unusable(cell.launcher, machine),
        "time_limit": _why_time_too_long(cell, machine),
    }


def _resolve_cell(matrix: Matrix, point: Point, menus: Menus, problems: list[Problem], cluster: Capacity | None) -> Cell | None:
    """Resolve one point into a cell. If the cell is not possible, append the reasons to `problems` and return None.

    cluster: as for `resolve_cells`.
    """
    problem_count = len(problems)

    def problem(key: str, sentence: str) -> None:
        problems.append(matrix.problem(point, key, sentence))

    draft = _check_draft(point, menus, problem)
    if draft is None:
        return None
    strategy, workload = menus.strategies[draft.strategy], menus.workloads[draft.workload]
    options = _fill_options(draft, strategy, workload, menus, problem)
    _check_switches(draft, strategy, problem)
    degrees = _fill_degrees(draft, strategy, problem)
    limits = _parse_limits(draft, problem)
    sizes = _compute_batch_sizes(draft, workload, strategy, degrees, problem)
    if len(problems) > problem_count or sizes is None:
        return None
    capacity = cluster.for_gpu_type(draft.gpu_type) if cluster is not None else None
    nnodes = draft.nnodes or _fewest_nodes(
        draft, menus.launchers[draft.launcher], capacity.gpus if capacity is not None else None
    )
    cell = _assemble_cell(draft, strategy, workload, nnodes, degrees, sizes, limits, options)
    _add_refusals(cell, strategy, workload, menus.launchers[draft.launcher], draft, problem)
    return cell if len(problems) == problem_count else None


def _check_draft(point: Point, menus: Menus, problem: AddProblem) -> Draft | None:
    """Check the types of a point's values. If a key is missing or a name is unknown, adds a problem and returns None."""
    try:
        draft = point.draft()
    except msgspec.ValidationError as error:
        problem("workload", f"a cell is not complete: {str(error)[0].lower()}{str(error)[1:]}.")
        return None
    names_by_key: dict[str, Collection[str]] = {
        "strategy": menus.strategies,
        "workload": menus.workloads,
        "launcher": menus.launchers,
    }
    faults = {key: fault for key, by_name in menus.faults.items() if (fault := by_name.get(getattr(draft, key)))}
    for key, fault in faults.items():
        problem(key, fault)
    if faults:
        return None
    unknown = [key for key, names in names_by_key.items() if getattr(draft, key) not in names]
    for key in unknown:
        problem(key, str(UnknownName(key, getattr(draft, key), names_by_key[key])))
    return None if unknown else draft


def _assemble_cell(
    draft: Draft,
    strategy: Strategy,
    workload: Workload,
    nnodes: int,
    degrees: dict[str, int],
    sizes: tuple[int, int, int],
    limits: tuple[int | None, int],
    options: dict[str, Any],
) -> Cell:
    """The cell of a draft whose keys were all checked.

    degrees: dp, tp and pp. sizes: global_batch_size, micro_batch_size and gradient_accumulation_steps. limits: the time limit
    and the hang limit in seconds. options: the options of the strategy and the workload.
    """
    global_batch_size, micro_batch_size, passes = sizes
    time_limit_s, hang_limit_s = limits
    same_keys = {key: getattr(draft, key) for key in Draft.__struct_fields__ if key in Cell.__struct_fields__}
    return Cell(
        **{
            **same_keys,
            **degrees,
            "nnodes": nnodes,
            "servers": (draft.servers or 1) if strategy.servers else 0,
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "gradient_accumulation_steps": passes,
            "seq_len": draft.seq_len or workload.seq_len,
            "optimizer": draft.optimizer or workload.optimizer,
            "time_limit_s": time_limit_s,
            "hang_limit_s": hang_limit_s,
            "options": options,
            "workload_code": workload.code,
            "strategy_code": strategy.code,
        }
    )


def _add_refusals(
    cell: Cell, strategy: Strategy, workload: Workload, launcher: Launcher, draft: Draft, problem: AddProblem
) -> None:
    """Add a problem for each reason why this cell cannot run. If the reason names an option that the file sets, the problem is
    reported at the place of this option."""
    for key, why in (
        ("workload", workload.refuse(cell)),
        ("strategy", strategy.refuse(cell)),
        ("nnodes", _why_uneven(cell, launcher)),
        *observed_steps.list_refusals(cell, cell.steps),
    ):
        if why is not None:
            named_options = [name for name in draft.options if why.startswith(f"{name}:") or f"({name})" in why]
            problem(f"options.{named_options[0]}" if named_options else key, why)


def _fill_options(draft: Draft, strategy: Strategy, workload: Workload, menus: Menus, problem: AddProblem) -> dict[str, Any]:
    """The options of the strategy and the workload, with the default value for each option that the draft does not set."""
    options_by_name = {option.name: option for option in (*strategy.options, *workload.options)}
    for name, value in draft.options.items():
        if name not in options_by_name:
            kind = f"option of {strategy.name} or {workload.name}"
            problem(f"options.{name}", str(UnknownName(kind, name, options_by_name)) + _suggest_condition(name, menus))
        elif (why := options_by_name[name].refuse(value)) is not None:
            problem(f"options.{name}", why)
    return {name: draft.options.get(name, option.default) for name, option in options_by_name.items()}


def _suggest_condition(option: str, menus: Menus) -> str:
    """A sentence that shows how to set an option only for the cells whose strategy or workload has this option; '' if no
    strategy or workload has it."""
    for key, variants in (("strategy", menus.strategies), ("workload", menus.workloads)):
        if owners := [name for name, variant in variants.items() if option in {entry.name for entry in variant.options}]:
            example = f"include: [{{when: \"{key} == '{owners[0]}'\", options: {{{option}: ...}}}}]"
            return f" It is an option of {', '.join(owners)}; to give it only to cells of {owners[0]}, write {example}."
    return ""


def _fill_degrees(draft: Draft, strategy: Strategy, problem: AddProblem) -> dict[str, int]:
    """The values of dp, tp and pp. If one value is missing, it is computed by division from the number of GPUs. A dimension
    that the strategy does not have gets 1."""
    given_degrees = {"dp": draft.dp, "tp": draft.tp, "pp": draft.pp}
    for name, size in given_degrees.items():
        if name not in strategy.degrees and size not in (None, 1):
            problem(name, f"{strategy.name} has no {name} dimension. Allowed: {', '.join(strategy.degrees)}.")
            return {"dp": draft.gpus, "tp": 1, "pp": 1}
    known_degrees = {name: given_degrees[name] for name in strategy.degrees}
    missing_names = [name for name, size in known_degrees.items() if size is None]
    product = math.prod(size for size in known_degrees.values() if size is not None)
    if len(missing_names) > 1:
        problem("strategy", f"{strategy.name} on {draft.gpus} ranks needs a value for {' or '.join(missing_names[::-1])}.")
    elif draft.gpus % product or (not missing_names and product != draft.gpus):
        sizes = " x ".join(f"{name}: {size}" for name, size in known_degrees.items() if size is not None)
        problem(next(n for n, size in known_degrees.items() if size is not None), f"{sizes} does not match {draft.gpus} ranks.")
    else:
        known_degrees |= dict.fromkeys(missing_names, draft.gpus // product)
    return {name: known_degrees.get(name) or 1 for name in given_degrees}


def _check_switches(draft: Draft, strategy: Strategy, problem: AddProblem) -> None:
    """Add a problem for each switch that the strategy does not support. If such a switch were ignored, the cells that are
    compared would not do the same work."""
    used_switches = {
        "activation_checkpointing": draft.activation_checkpointing != "none",
        "compile": draft.compile,
        "max_grad_norm": draft.max_grad_norm is not None,
    }
    for name in (name for name, is_used in used_switches.items() if is_used and name not in strategy.switches):
        problem(name, f"{strategy.name} does not support {name}. Allowed: leave {name} out.")
    if draft.activation_checkpointing.startswith("segments-") and strategy.degrees != ("dp",):
        problem(
            "activation_checkpointing",
            f"{strategy.name} splits the model over ranks, so segments are not possible. Allowed: none, full, every-K.",
        )
    if draft.instruments.checkpoints is not None and strategy.no_checkpoints:
        why = f"{strategy.name} keeps no checkpoints: {strategy.no_checkpoints}"
        problem("instruments.checkpoints", f"{why}. Allowed: leave instruments.checkpoints out.")
    if draft.servers is not None and not strategy.servers:
        problem("servers", f"{strategy.name} has no parameter servers. Allowed: leave servers out.")


def _compute_batch_sizes(
    draft: Draft, workload: Workload, strategy: Strategy, degrees: dict[str, int], problem: AddProblem
) -> tuple[int, int, int] | None:
    """Check the lengths, the instruments and the precision of a draft, then compute its batch sizes.

    Returns (global_batch_size, micro_batch_size, gradient_accumulation_steps); if the sizes are not possible, adds a problem
    and returns None.
    """
    if (draft.steps is None) == (draft.epochs is None):
        found_keys = "neither" if draft.steps is None else "both"
        problem("steps", f"exactly one of steps and epochs is needed, found {found_keys}.")
    if draft.seq_len is not None and workload.seq_len is None:
        problem("seq_len", f"{workload.name} has no sequences. Allowed: leave seq_len out.")
    for key, interval in (("validation", draft.instruments.validation), ("checkpoints", draft.instruments.checkpoints)):
        if interval is not None and (interval.every_steps is None) == (interval.every_epochs is None):
            found_keys = "neither" if interval.every_steps is None else "both"
            problem(f"instruments.{key}", f"exactly one of every_steps and every_epochs is needed, found {found_keys}.")
    if (why := strategy.refuse_precision(draft.precision)) is not None:
        problem("precision", why)
    try:
        return cell_sizes.compute_batch_sizes(draft, degrees["dp"])
    except cell_sizes.BatchError as error:
        problem(error.key, str(error))
        return None


def _parse_limits(draft: Draft, problem: AddProblem) -> tuple[int | None, int]:
    """The time limit (None if the draft has none) and the hang limit, in seconds."""
    limits: dict[str, int] = {}
    for key, text in (("time_limit", draft.time_limit), ("hang_limit", draft.hang_limit)):
        try:
            limits |= {} if text is None else {key: cell_sizes.parse_seconds(text)}
        except ValueError as error:
            problem(key, str(error))
    # The hang limit is 0 only if a problem was added; then no cell is made.
    return limits.get("time_limit"), limits.get("hang_limit", 0)


def _fewest_nodes(draft: Draft, launcher: Launcher, per_node: int | None) -> int:
    return math.ceil(draft.gpus / per_node) if per_node and launcher.several_nodes else 1


def _why_uneven(cell: Cell, launcher: Launcher) -> str | None:
    if cell.nnodes > 1 and not launcher.several_nodes:
        return f"{launcher.name} starts ranks on one node only. Allowed: nnodes: 1, or another launcher."
    if cell.world_size % cell.nnodes:
        servers = f" and {cell.servers} parameter server(s)" if cell.servers else ""
        return f"{cell.gpus} ranks{servers} cannot be divided evenly among {cell.nnodes} nodes."
    return None


def why_unusable(launcher: str, machine: Capacity) -> str | None:
    """Why a launcher cannot start ranks on these machines; None if it can. launcher: its name."""
    menu = launchers()
    if not machine.here:
        if machine.per_rank or not menu[launcher].per_rank:
            return None
        others = ", ".join(name for name, other in menu.items() if not other.per_rank)
        return f"the launcher {launcher} starts its ranks by Slurm, which the cluster does not have. Allowed: {others}."
    missing = [program for program in menu[launcher].needs if shutil.which(program) is None]
    if not missing:
        return None
    programs = f"{' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed on {gethostname()}"
    return f"the launcher {launcher} needs {programs}. Install what is missing, or choose another launcher."


def _why_too_few_nodes(cell: Cell, machine: Capacity) -> str | None:
    if machine.nodes is None or cell.nnodes <= machine.nodes:
        return None
    return f"needs {cell.nnodes} nodes, the cluster has {machine.nodes}."


def _why_gpu_type_unknown(cell: Cell, machine: Capacity) -> str | None:
    if not machine.types:
        return f"names the GPU type {cell.gpu_type}, but the cluster file names no type. Allowed: leave gpu_type out."
    return str(UnknownName("GPU type of the cluster", str(cell.gpu_type), machine.types))


def _why_environment_unknown(cell: Cell, machine: Capacity) -> str | None:
    if cell.environment is None or cell.environment in machine.environments:
        return None
    if not machine.environments:
        return f"names the environment {cell.environment}, but the cluster file has no environments. Allowed: leave it out."
    return str(UnknownName("environment of the cluster", cell.environment, machine.environments))


def _why_time_too_long(cell: Cell, machine: Capacity) -> str | None:
    if machine.longest_s is None or cell.time_limit_s is None or cell.time_limit_s <= machine.longest_s:
        return None
    return f"has a time limit of {cell.time_limit_s} s, the partition allows {machine.longest_s} s."


def _why_too_few_gpus(cell: Cell, machine: Capacity) -> str | None:
    if machine.has_slices and cell.launcher != "fork" and cell.gpus > 1:
        why = "the cluster's GPUs are slices of GPUs (MIG), between which ranks cannot communicate"
        return f"needs {cell.gpus} GPUs, but {why}. Allowed: cells with one GPU."
    if machine.gpus is not None and cell.launcher != "fork" and cell.gpus > machine.gpus * cell.nnodes:
        return f"needs {cell.gpus} GPUs, the cluster has {machine.gpus} per node."
    return None
