"""The menus of strategies and workloads. Importing this module does not import torch.

The menus contain the strategies and workloads that ship with shardlab. `add_own_strategy` and `add_own_workload` add a
workspace's own strategies and workloads, which are identified by their name and the digest of their code, as in a cell. So one
process can use workspaces that have different models with the same name.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from shardlab import registry
from shardlab.errors import InputError, UnknownName
from shardlab.matrix.cell import Cell
from shardlab.plugins.plugin_kind import OwnWorkload, WorkloadFacts
from trainers.strategy import Strategy
from trainers.workload import Workload
from trainers.workload_options import refuse_tokens

# The number of blocks to which the same-work proof shortens a model that a configuration file defines, if the whole model does
# not fit into one process.
LAYERS_OF_PROOF = 2
_own_workloads: dict[tuple[str, str], Workload] = {}  # workloads of workspaces, by (name, digest of the code)
_own_strategies: dict[tuple[str, str], Strategy] = {}  # strategies of workspaces, by (name, digest of the code)


def load_strategies() -> dict[str, Strategy]:
    """Every strategy of the menu by name, in the order of the files in trainers/strategies."""
    return {variant.name: variant for module in registry.load_plugins("trainers.strategies") for variant in module.VARIANTS}


def load_workloads() -> dict[str, Workload]:
    """Every workload of the menu by name, in the order of the files in trainers/workloads."""
    return {variant.name: variant for module in registry.load_plugins("trainers.workloads") for variant in module.VARIANTS}


def refuse(cell: Cell) -> str | None:
    """Why a resolved cell cannot be trained, as a sentence; None if it can be trained. `jobs` makes the same check when it
    reads a matrix."""
    cell_strategy, cell_workload = find_strategy_of_cell(cell), find_workload_of_cell(cell)
    for option in (*cell_strategy.options, *cell_workload.options):
        if (why := option.explain_refused_value(cell.options.get(option.name, option.default))) is not None:
            return f"{option.name}: {why}"
    return cell_strategy.refuse_precision(cell.precision) or cell_workload.refuse(cell) or cell_strategy.refuse(cell)


def find_strategy(name: str) -> Strategy:
    """The strategy with this name. Raises UnknownName, which lists the menu."""
    strategies = load_strategies()
    if name not in strategies:
        raise UnknownName("strategy", name, strategies)
    return strategies[name]


def find_workload(name: str) -> Workload:
    """The workload with this name. Raises UnknownName, which lists the menu."""
    workloads = load_workloads()
    if name not in workloads:
        raise UnknownName("workload", name, workloads)
    return workloads[name]


def add_own_strategy(own_strategy: Strategy) -> None:
    """Add a strategy of a workspace's own file, so that `find_strategy_of_cell` finds it."""
    assert own_strategy.code is not None
    _own_strategies[own_strategy.name, own_strategy.code] = own_strategy


def find_strategy_of_cell(cell: Cell) -> Strategy:
    """The strategy of a cell. Raises UnknownName, which lists the menu, or InputError if the workspace's own strategy was not
    added."""
    if cell.strategy_code is None:
        return find_strategy(cell.strategy)
    own_strategy = _own_strategies.get((cell.strategy, cell.strategy_code))
    if own_strategy is None:
        raise InputError(f"the code {cell.strategy_code} of the strategy {cell.strategy} is not known here.")
    return own_strategy


def add_own_workload(description: OwnWorkload, file: Path) -> Workload:
    """Add a workload of a workspace's own file, so that `find_workload_of_cell` finds it, and return it.

    description: the description of the workload. file: the file that a rank executes, or the configuration that it reads.
    """
    workload_facts = {name: getattr(description, name) for name in (*WorkloadFacts.__struct_fields__, "code", "file")}
    own_workload = Workload(**workload_facts, task="trainers.tasks.own", settings={"file": file})
    if description.is_data:
        own_workload = msgspec.structs.replace(
            own_workload,
            task="trainers.tasks.configured",
            settings={"file": file, "twin": description.twin},
            proof_options={option.name: LAYERS_OF_PROOF for option in description.options if option.name == "n_layer"},
            refuse=partial(_refuse_sequence_or_data, longest=description.longest),
        )
    _own_workloads[description.name, description.code] = own_workload
    return own_workload


def _refuse_sequence_or_data(cell: Cell, *, longest: int | None) -> str | None:
    """Why a model that a configuration file defines cannot be trained with a cell's seq_len or data, as a sentence; None if it
    can be trained.

    longest: the longest possible sequence in tokens; None if there is no limit.
    """
    if longest is not None and cell.seq_len is not None and cell.seq_len > longest:
        return f"{cell.workload} has {longest} positions, found seq_len: {cell.seq_len}. Allowed: up to {longest}."
    return refuse_tokens(cell) if "tokens_file" in cell.options else None


def find_workload_of_cell(cell: Cell) -> Workload:
    """The workload of a cell. Raises UnknownName, which lists the menu, or InputError if the workspace's own workload was not
    added."""
    if cell.workload_code is None:
        return find_workload(cell.workload)
    own_workload = _own_workloads.get((cell.workload, cell.workload_code))
    if own_workload is None:
        raise InputError(f"the code {cell.workload_code} of the workload {cell.workload} is not known here.")
    return own_workload
