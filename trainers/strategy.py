"""The interface of a strategy's entry on the menu: plain data, readable without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.plugins.plugin_kind import StrategyFacts
from trainers.theory.division import Division
from trainers.theory.term import ModelPart, Term

if TYPE_CHECKING:
    from trainers.engine import Engine, Server
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task

SWITCHES = ("activation_checkpointing", "compile", "max_grad_norm")  # keys of a cell that a strategy may support


class Strategy(StrategyFacts, frozen=True, kw_only=True):
    """A strategy on the menu. A family of strategies, such as FSDP, has several of these variants.

    If `servers` is true, the function `build_server` of the engine's module builds the parameter servers. If `cuts` is None,
    `theory_of_memory` says how the strategy divides the model.
    """

    refuse: Callable[[Cell], str | None]
    """Returns why a cell cannot run, as a sentence, or None. The function gets the resolved cell, whose options are within
    their bounds, and needs no torch (`Workload.refuse` says how a sentence names an option)."""
    engine: str
    """The module whose function `build` makes the engine. The module imports torch, so only ranks import it."""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments for `build` of the engine's module. The variants of a family differ in them."""
    unprovable: Callable[[Cell], str | None] = lambda _: None
    """Returns why a cell cannot be compared with one process although the strategy is meant to do the same work, as a sentence,
    or None. Such a cell is ranked, with a remark."""
    other_work: Callable[[Cell], str | None] = lambda _: None
    """Returns why a cell by design does other work than one process (for example, it averages parameters only every few steps,
    or it approximates gradients), as a sentence, or None. Such a cell is never ranked."""
    communication_period: Callable[[Cell], int | None] = lambda _: 1
    """Returns after how many optimizer steps the communication of a cell repeats. `Engine.theory` gives the mean per step over
    the period, and the proof counts a whole period. None: the bytes cannot be counted, because other threads than the training
    thread start the collectives."""
    theory_of_memory: Callable[[Cell, int], Division] | None = None
    """What a rank keeps, by theory (trainers/theory). The function gets the cell and the number of parameters of the whole
    model. None: what `cuts` say."""
    theory_of_communication: Callable[[Cell, ModelPart], list[Term] | None] = lambda *_: None
    """What a rank sends in a step, by theory (trainers/theory). `Engine.theory` asks the same function, with exact sizes. The
    function returns None if it cannot tell from the sizes that are known."""
    sync: Callable[[Cell], object] = lambda cell: cell.options.get("sync")
    """Returns which passes of a step exchange gradients, as a key of `gradient_sync.IN_WORDS`; None: not known, or none."""
    code: str | None = None
    """The digest of the workspace's files that define the strategy (shardlab/files/plugin_source.py); None: shardlab ships the
    strategy."""
    file: str | None = None
    """The workspace's file that defines the strategy; None: shardlab ships the strategy."""

    def refuse_precision(self, precision: str) -> str | None:
        """Why the strategy does not support a precision, as a sentence, or None."""
        if precision in self.precisions:
            return None
        why = f": {self.reasons[precision]}" if precision in self.reasons else ""
        return f"{self.name} cannot honour {precision}{why}. Allowed: {', '.join(self.precisions)}."

    def build(self, cell: Cell, task: Task, ranks: Ranks) -> Engine:
        """Build the engine of a rank that trains. Imports torch."""
        return cast("Engine", importlib.import_module(self.engine).build(cell, task, ranks, **self.settings))

    def build_server(self, cell: Cell, task: Task, ranks: Ranks) -> Server:
        """Build the parameter server that runs on this rank. Imports torch."""
        return cast("Server", importlib.import_module(self.engine).build_server(cell, task, ranks, **self.settings))
