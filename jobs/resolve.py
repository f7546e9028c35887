"""Resolves the points of a matrix into cells. A point that is not possible is reported as file:line:column with the reason."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from socket import gethostname
from typing import Any

import msgspec

from jobs.launcher import Launcher, launchers
from shardlab import cell as cells
from shardlab import claims
from shardlab.cell import Cell, Draft
from shardlab.document import Problem
from shardlab.errors import UnknownName
from shardlab.matrix import Matrix, Point
from trainers import menu
from trainers.instruments import windows
from trainers.strategy import Strategy
from trainers.workload import Workload


class Machine(msgspec.Struct, frozen=True):
    """What the scheduler has to offer. gpus: of a node; None if ranks are processes on a CPU. here: whether runs start on this
    machine, so that the programs of their launchers can be looked for."""

    nodes: int
    gpus: int | None
    here: bool = False


class Misfit(msgspec.Struct, frozen=True):
    """A cell that does not fit the machine: its name, the reason, and the place of the cell in the file."""

    cell: str
    why: str
    problem: Problem


class Menus(msgspec.Struct, frozen=True):
    """Every name that a cell may mention."""

    strategies: dict[str, Strategy]
    workloads: dict[str, Workload]
    launchers: dict[str, Launcher]


def resolve(matrix: Matrix, machine: Machine | None = None, per_node: int | None = None) -> list[Cell]:
    """The cells of a matrix in its order, one for each point.

    machine: if given, all cells must fit on it. per_node: the GPUs of a node; a cell without nnodes gets the fewest nodes that
    hold its GPUs.

    Raises InputError that lists every problem with its place.
    """
    menus = Menus(menu.strategies(), menu.workloads(), launchers())
    problems: list[Problem] = []
    if matrix.file.baseline not in menus.strategies:
        sentence = str(UnknownName("strategy", matrix.file.baseline, menus.strategies))
        problems.append(matrix.document.problem(("baseline",), sentence))
    found: list[Cell] = []
    first: dict[str, int] = {}
    for number, point in enumerate(matrix.points, start=1):
        cell = _cell(matrix, point, menus, problems, per_node)
        if cell is None:
            continue
        if cell.hash() in first:
            sentence = f"cells {first[cell.hash()]} and {number} are the same run. Use `repeats` to run a cell more than once."
            problems.append(matrix.problem(point, next(reversed(point.keys)), sentence))
        first.setdefault(cell.hash(), number)
        found.append(cell)
    if not problems:
        excluded = [entry.cell for entry in matrix.excluded]
        problems = claims.without_cells(matrix.document, matrix.file.tests, found, excluded)
    if problems:
        raise matrix.document.errors(problems)
    if machine is not None and (unheld := misfits(matrix, found, machine, found)):
        raise matrix.document.errors([one.problem for one in unheld])
    return found


def misfits(matrix: Matrix, cells: Sequence[Cell], machine: Machine, chosen: Sequence[Cell]) -> list[Misfit]:
    """The cells of `chosen` that do not fit the machine. cells: all cells of the matrix, in its order."""
    found = []
    names = {cell.name() for cell in chosen}
    for point, cell in zip(matrix.points, cells, strict=True):
        launcher = _launcher(cell) if machine.here else None
        for key, why in (("nnodes", _nodes(cell, machine)), ("gpus", _gpus(cell, machine)), ("launcher", launcher)):
            if why is not None and cell.name() in names:
                found.append(Misfit(cell.name(), why, matrix.problem(point, key, why)))
    return found


def _cell(matrix: Matrix, point: Point, menus: Menus, problems: list[Problem], per_node: int | None) -> Cell | None:
    """One resolved cell, or None after its problems were appended."""
    before = len(problems)

    def problem(key: str, sentence: str) -> None:
        problems.append(matrix.problem(point, key, sentence))

    try:
        draft = point.draft()
    except msgspec.ValidationError as error:
        problem("workload", f"a cell is not complete: {str(error)[0].lower()}{str(error)[1:]}.")
        return None
    for key, kind, names in (
        ("strategy", "strategy", menus.strategies),
        ("workload", "workload", menus.workloads),
        ("launcher", "launcher", menus.launchers),
    ):
        if getattr(draft, key) not in names:
            problem(key, str(UnknownName(kind, getattr(draft, key), names)))
    if len(problems) > before:
        return None
    strategy, workload = menus.strategies[draft.strategy], menus.workloads[draft.workload]
    options = _options(draft, strategy, workload, problem)
    _switches(draft, strategy, problem)
    degrees = _degrees(draft, strategy, problem)
    limits = _limits(draft, problem)
    sizes = _sizes(draft, workload, strategy, degrees, problem)
    if len(problems) > before or sizes is None:
        return None
    cell = Cell(
        workload=draft.workload,
        strategy=draft.strategy,
        gpus=draft.gpus,
        nnodes=draft.nnodes or _fewest(draft, menus.launchers[draft.launcher], per_node),
        dp=degrees["dp"],
        tp=degrees["tp"],
        pp=degrees["pp"],
        servers=(draft.servers or 1) if strategy.servers else 0,
        launcher=draft.launcher,
        global_batch_size=sizes[0],
        micro_batch_size=sizes[1],
        gradient_accumulation_steps=sizes[2],
        seq_len=draft.seq_len or workload.seq_len,
        steps=draft.steps,
        epochs=draft.epochs,
        warmup_steps=draft.warmup_steps,
        precision=draft.precision,
        activation_checkpointing=draft.activation_checkpointing,
        compile=draft.compile,
        max_grad_norm=draft.max_grad_norm,
        prove=draft.prove,
        optimizer=draft.optimizer or workload.optimizer,
        schedule=draft.schedule,
        instruments=draft.instruments,
        memory_limit_gib=draft.memory_limit_gib,
        seed=draft.seed,
        time_limit_s=limits[0],
        hang_limit_s=limits[1],
        expect=draft.expect,
        options=options,
    )
    for key, why in (
        ("workload", workload.refuse(cell)),
        ("strategy", strategy.refuse(cell)),
        ("nnodes", _uneven(cell, menus.launchers[draft.launcher])),
        *windows.refusals(cell, cell.steps),
    ):
        if why is not None:
            named = [name for name in draft.options if why.startswith(f"{name}:") or f"({name})" in why]
            problem(f"options.{named[0]}" if named else key, why)
    return cell if len(problems) == before else None


def _options(draft: Draft, strategy: Strategy, workload: Workload, problem: Any) -> dict[str, Any]:
    """The options of strategy and workload with every default written out."""
    known = {option.name: option for option in (*strategy.options, *workload.options)}
    for name, value in draft.options.items():
        if name not in known:
            what = f"option of {strategy.name} or {workload.name}"
            problem(f"options.{name}", str(UnknownName(what, name, known)))
        elif (why := known[name].refuse(value)) is not None:
            problem(f"options.{name}", why)
    return {name: draft.options.get(name, option.default) for name, option in known.items()}


def _degrees(draft: Draft, strategy: Strategy, problem: Any) -> dict[str, int]:
    """dp, tp and pp: the given values, the missing one by division, and 1 for a dimension that the strategy does not have."""
    given = {"dp": draft.dp, "tp": draft.tp, "pp": draft.pp}
    for name, size in given.items():
        if name not in strategy.degrees and size not in (None, 1):
            problem(name, f"{strategy.name} has no {name} dimension. Allowed: {', '.join(strategy.degrees)}.")
            return {"dp": draft.gpus, "tp": 1, "pp": 1}
    known = {name: given[name] for name in strategy.degrees}
    left = [name for name, size in known.items() if size is None]
    product = math.prod(size for size in known.values() if size is not None)
    if len(left) > 1:
        problem("strategy", f"{strategy.name} on {draft.gpus} ranks needs a value for {' or '.join(left[::-1])}.")
    elif draft.gpus % product or (not left and product != draft.gpus):
        sizes = " x ".join(f"{name}: {size}" for name, size in known.items() if size is not None)
        problem(next(n for n, size in known.items() if size is not None), f"{sizes} does not match {draft.gpus} ranks.")
    else:
        known |= dict.fromkeys(left, draft.gpus // product)
    return {name: known.get(name) or 1 for name in given}


def _switches(draft: Draft, strategy: Strategy, problem: Any) -> None:
    """Refuse switches that the strategy does not support: a switch that is ignored would make a comparison unequal."""
    asked = {
        "activation_checkpointing": draft.activation_checkpointing != "none",
        "compile": draft.compile,
        "max_grad_norm": draft.max_grad_norm is not None,
    }
    for name in (name for name, on in asked.items() if on and name not in strategy.switches):
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


def _sizes(
    draft: Draft, workload: Workload, strategy: Strategy, degrees: dict[str, int], problem: Any
) -> tuple[int, int, int] | None:
    """The batch sizes, after the checks that need no more than the draft."""
    if (draft.steps is None) == (draft.epochs is None):
        found = "neither" if draft.steps is None else "both"
        problem("steps", f"exactly one of steps and epochs is needed, found {found}.")
    if draft.seq_len is not None and workload.seq_len is None:
        problem("seq_len", f"{workload.name} has no sequences. Allowed: leave seq_len out.")
    for key, every in (("validation", draft.instruments.validation), ("checkpoints", draft.instruments.checkpoints)):
        if every is not None and (every.every_steps is None) == (every.every_epochs is None):
            found = "neither" if every.every_steps is None else "both"
            problem(f"instruments.{key}", f"exactly one of every_steps and every_epochs is needed, found {found}.")
    if (why := strategy.refuse_precision(draft.precision)) is not None:
        problem("precision", why)
    try:
        return cells.batch(draft, degrees["dp"])
    except cells.BatchError as error:
        problem(error.key, str(error))
        return None


def _limits(draft: Draft, problem: Any) -> tuple[int | None, int]:
    """The time limit and the hang limit, in seconds."""
    found: dict[str, int] = {}
    for key, text in (("time_limit", draft.time_limit), ("hang_limit", draft.hang_limit)):
        try:
            found |= {} if text is None else {key: cells.seconds(text)}
        except ValueError as error:
            problem(key, str(error))
    return found.get("time_limit"), found.get("hang_limit", 0)  # 0 beside a problem, which keeps the cell from being made


def _fewest(draft: Draft, launcher: Launcher, per_node: int | None) -> int:
    return math.ceil(draft.gpus / per_node) if per_node and launcher.several_nodes else 1


def _uneven(cell: Cell, launcher: Launcher) -> str | None:
    if cell.nnodes > 1 and not launcher.several_nodes:
        return f"{launcher.name} starts ranks on one node only. Allowed: nnodes: 1, or another launcher."
    if cell.world_size % cell.nnodes:
        servers = f" and {cell.servers} parameter server(s)" if cell.servers else ""
        return f"{cell.gpus} ranks{servers} cannot be divided evenly among {cell.nnodes} nodes."
    return None


def _launcher(cell: Cell) -> str | None:
    missing = [program for program in launchers()[cell.launcher].needs if shutil.which(program) is None]
    if not missing:
        return None
    programs = f"{' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed on {gethostname()}"
    return f"the launcher {cell.launcher} needs {programs}. Install what is missing, or choose another launcher."


def _nodes(cell: Cell, machine: Machine) -> str | None:
    return f"needs {cell.nnodes} nodes, the cluster has {machine.nodes}." if cell.nnodes > machine.nodes else None


def _gpus(cell: Cell, machine: Machine) -> str | None:
    if machine.gpus is not None and cell.launcher != "fork" and cell.gpus > machine.gpus * cell.nnodes:
        return f"needs {cell.gpus} GPUs, the cluster has {machine.gpus} per node."
    return None
