"""The strategy of a cell, and how it divides a model over its ranks: the menu's entry of the strategy says it."""

from __future__ import annotations

import functools

from shardlab.matrix.cell import Cell
from trainers import menu
from trainers.strategy import Strategy
from trainers.theory.division import Division, divide_by_cuts


@functools.cache
def find_strategy(strategy_name: str) -> Strategy:
    """The strategy with this name. The result is cached, because a plan may have thousands of cells."""
    return menu.find_strategy(strategy_name)


def divide_model(cell: Cell, parameters: int) -> Division:
    """How the strategy of a cell divides the model. parameters: the number of parameters of the whole model, from which the
    size of DeepSpeed's buckets follows."""
    strategy = find_strategy(cell.strategy)
    if strategy.theory_of_memory is None:
        return divide_by_cuts(cell, strategy.cuts or ())
    return strategy.theory_of_memory(cell, parameters)
