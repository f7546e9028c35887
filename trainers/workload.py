"""The interface of a workload's entry on the menu: plain data, readable without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.plugins.plugin_kind import WorkloadFacts

if TYPE_CHECKING:
    from trainers.task import Task


class Workload(WorkloadFacts, frozen=True, kw_only=True):
    """A workload on the menu: a model with its data. A family of models, such as GPT-2, has several of these variants."""

    task: str
    """The module whose function `build` makes the task. The module imports torch, so only ranks import it."""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments for `build` of the task's module. The variants of a family differ in them."""
    heads: str | None = None
    """The name of the option with the number of attention heads, which tensor parallelism splits; None: there is no such
    option."""
    blocks: str | None = None
    """The name of the option with the number of repeated blocks, which a pipeline divides into stages; None: there is no such
    option."""
    code: str | None = None
    """The digest of the workspace's files that define the workload (shardlab/files/plugin_source.py); None: shardlab ships the
    workload."""
    file: str | None = None
    """The workspace's file that defines the workload; None: shardlab ships the workload."""
    proof_options: dict[str, int] = msgspec.field(default_factory=dict)
    """Options that make the model smaller. The same-work proof uses them if one process cannot hold the model."""
    refuse: Callable[[Cell], str | None] = lambda _: None
    """Returns why the model of a cell cannot be built, as a sentence, or None. The function gets the resolved cell, whose
    options are within their bounds, and needs no torch. If the sentence begins with `NAME:` or contains `(NAME)`, the error
    points at the option NAME in the matrix file."""

    @property
    def is_data(self) -> bool:
        """Whether a configuration file (.json) defines the workload, and not code."""
        return self.file is not None and self.file.endswith(".json")

    def has_default_options(self, cell: Cell) -> bool:
        """Whether all options of the workload have their default in a cell."""
        return all(cell.options.get(option.name) == option.default for option in self.options)

    def build(self, cell: Cell, data_path: Path) -> Task:
        """The task of a cell on this rank. data_path: the folder or file from which this rank reads its data. Imports torch."""
        return cast("Task", importlib.import_module(self.task).build(cell, data_path, **self.settings))
