"""The menus of strategies and workloads. Importing this module does not import torch."""

from __future__ import annotations

from shardlab import registry
from shardlab.cell import Cell
from shardlab.errors import UnknownName
from trainers.strategy import Strategy
from trainers.workload import Workload


def strategies() -> dict[str, Strategy]:
    """Every strategy by name, in the order of the families' files."""
    return {s.name: s for module in registry.load_all("trainers.strategies") for s in module.VARIANTS}


def workloads() -> dict[str, Workload]:
    """Every workload by name, in the order of the families' files."""
    return {w.name: w for module in registry.load_all("trainers.workloads") for w in module.VARIANTS}


def refuse(cell: Cell) -> str | None:
    """Why a resolved cell cannot be trained, as a sentence, or None. `jobs` says the same when it reads a matrix."""
    of_strategy, of_workload = strategy(cell.strategy), workload(cell.workload)
    for option in (*of_strategy.options, *of_workload.options):
        if (why := option.refuse(cell.options.get(option.name, option.default))) is not None:
            return f"{option.name}: {why}"
    return of_strategy.refuse_precision(cell.precision) or of_workload.refuse(cell) or of_strategy.refuse(cell)


def strategy(name: str) -> Strategy:
    """The strategy with this name. Raises UnknownName with the menu."""
    menu = strategies()
    if name not in menu:
        raise UnknownName("strategy", name, menu)
    return menu[name]


def workload(name: str) -> Workload:
    """The workload with this name. Raises UnknownName with the menu."""
    menu = workloads()
    if name not in menu:
        raise UnknownName("workload", name, menu)
    return menu[name]
