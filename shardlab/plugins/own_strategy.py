"""The description of a strategy that a file of the workspace defines (WORKSPACE/strategies/NAME.py).

`jobs` uses this description and never executes the file itself; `python -m trainers` executes the file in a process of its own.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from shardlab.matrix.cell import Cell, Precision
from shardlab.plugins.own_workload import OwnWorkload
from shardlab.registry import Option

FOLDER = "strategies"  # folder of a workspace with the files of strategies; a run folder has copies in a folder of this name
NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")


class OwnStrategy(msgspec.Struct, frozen=True):
    """The properties of a strategy of the workspace. Its functions stay in its file, which only processes of trainers execute.

    The other fields mean the same as in trainers.strategy.Strategy.
    """

    name: Annotated[str, msgspec.Meta(pattern=rf"^{NAME.pattern}\Z")]
    """The name in a matrix."""
    summary: Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
    """What the strategy does, in one line."""
    code: str
    """The digest of the files that define the strategy."""
    file: str
    """The path of the file that defines the strategy, in the workspace from which the run was submitted."""
    precisions: Annotated[tuple[Precision, ...], msgspec.Meta(min_length=1)]
    """The precisions that the strategy supports."""
    options: tuple[Option, ...] = ()
    """Options of the strategy, with defaults and bounds."""
    degrees: Annotated[tuple[Literal["dp", "tp", "pp"], ...], msgspec.Meta(min_length=1)] = ("dp",)
    """The kinds of parallelism that the strategy has: data (dp), tensor (tp), pipeline (pp)."""
    switches: tuple[Literal["activation_checkpointing", "compile", "max_grad_norm"], ...] = ()
    """Which of these keys of a cell the strategy supports."""
    servers: bool = False
    """Whether the strategy has parameter servers."""
    cuts: tuple[Literal["parameter", "gradient", "optimizer_state"], ...] | None = None
    """What the strategy shards according to textbooks; null: not known."""
    tolerates_lost_ranks: bool = False
    """Whether the run continues without a rank that ended."""
    no_checkpoints: str = ""
    """Why a run cannot be saved; empty: it can."""
    reasons: dict[str, str] = {}
    """By precision: why it is not supported."""


class StrategyDescription(msgspec.Struct, frozen=True):
    """What `python -m trainers describe` prints about a file of WORKSPACE/strategies."""

    strategies: list[OwnStrategy] = []
    """The strategies that the file defines."""
    fault: str = ""
    """Why the file defines no strategy, as a sentence; else empty."""


class RefusalQuestion(msgspec.Struct, frozen=True):
    """A question to the process `python -m trainers refuse`, as a line of JSON: does this strategy refuse this cell?"""

    strategy: str
    """The name of the strategy."""
    cell: Cell
    """A resolved cell."""
    own_workload: OwnWorkload | None = None
    """The workload of the cell, if a file of the workspace defines it."""


class RefusalAnswer(msgspec.Struct, frozen=True):
    """The answer of `python -m trainers refuse` to a RefusalQuestion, as a line of JSON."""

    why: str | None = None
    """The reason for the refusal, as a sentence; None: the strategy does not refuse the cell."""
    fault: str = ""
    """The error in the code of the strategy, as a sentence; else empty."""
