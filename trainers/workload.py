"""The interface of a workload's entry on the menu: plain data, readable without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from shardlab.cell import Cell, Optimizer
from shardlab.registry import Option

if TYPE_CHECKING:
    from trainers.task import Task


class Workload(msgspec.Struct, frozen=True):
    """A workload on the menu: a model with its data. A family of models, such as GPT-2, has several of these variants."""

    name: str
    summary: str
    parameters: int
    """Number of trainable parameters, tied weights once."""
    unit: str
    """The unit of throughput (tokens, images)."""
    flops_per_unit: float | None
    """Floating-point operations of forward and backward for a unit at the default options, by the formula of `flops_source`;
    None if they are not known."""
    flops_source: str
    optimizer: Optimizer
    """The default optimizer, always written into run.json."""
    task: str
    """The module whose function `build` makes the task. It imports torch, so only a rank imports it."""
    settings: dict[str, Any] = {}
    """Keyword arguments of that `build`, for what differs between variants of a family."""
    seq_len: int | None = None
    """The default sequence length; None if the workload has no sequences."""
    options: tuple[Option, ...] = ()
    heads: str | None = None
    """The name of the option with the number of attention heads, which tensor parallelism splits; None if none."""
    blocks: str | None = None
    """The name of the option with the number of repeated blocks, which a pipeline divides into stages; None if none."""
    tensor_degrees: tuple[int, ...] = ()
    """Of a workspace's own workload at its default options: over how many ranks, from 2, its layers can be split; empty: it
    defines no split."""
    most_stages: int = 0
    """Of a workspace's own workload at its default options: the number of blocks if they can be divided into stages, else 0."""
    code: str | None = None
    """The digest of the files that define it, if they are the workspace's own (shardlab/plugin_source.py); None: it ships."""
    file: str | None = None
    """The workspace's own file that defines it; None: it ships."""
    proof_options: dict[str, int] = {}
    """Options of a smaller model, for a proof if one process cannot hold the model."""
    refuse: Callable[[Cell], str | None] = lambda _: None
    """Returns why the model of a cell cannot be built, as a sentence, or None. It gets the resolved cell, whose options are
    within their bounds, and needs no torch. If the sentence begins with `NAME:` or contains `(NAME)`, the error points at the
    option NAME in the matrix file."""

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
