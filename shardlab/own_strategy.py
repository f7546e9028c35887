"""A strategy that a file of the workspace defines (WORKSPACE/strategies/NAME.py): what `jobs` knows of it without that code."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from shardlab.cell import Cell, Precision
from shardlab.own_workload import OwnWorkload
from shardlab.registry import Option

FOLDER = "strategies"  # in a workspace, and the folder of the copies in the folder of a run
NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")


class OwnStrategy(msgspec.Struct, frozen=True):
    """The data of a strategy; its functions are asked of its file. name, summary and so on: as in trainers.strategy.Strategy.

    code: the digest of its files. file: the file that defines it, in the workspace from which the run was submitted.
    """

    name: Annotated[str, msgspec.Meta(pattern=f"^{NAME.pattern}$")]
    summary: Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
    code: str
    file: str
    precisions: Annotated[tuple[Precision, ...], msgspec.Meta(min_length=1)]
    options: tuple[Option, ...] = ()
    degrees: Annotated[tuple[Literal["dp", "tp", "pp"], ...], msgspec.Meta(min_length=1)] = ("dp",)
    switches: tuple[Literal["activation_checkpointing", "compile", "max_grad_norm"], ...] = ()
    servers: bool = False
    cuts: tuple[Literal["parameter", "gradient", "optimizer_state"], ...] | None = None
    tolerates_lost_ranks: bool = False
    no_checkpoints: str = ""
    reasons: dict[str, str] = {}


class StrategyDescription(msgspec.Struct, frozen=True):
    """What `python -m trainers describe` found in a file of strategies, or why it defines none."""

    strategies: list[OwnStrategy] = []
    fault: str = ""


class RefusalQuestion(msgspec.Struct, frozen=True):
    """A question to `python -m trainers refuse`, as a line of JSON: whether this strategy refuses this cell.

    cell: a resolved cell in its plain form. own_workload: the cell's workload, if it is the workspace's own.
    """

    strategy: str
    cell: Cell
    own_workload: OwnWorkload | None = None


class RefusalAnswer(msgspec.Struct, frozen=True):
    """The answer, as a line of JSON. why: the reason as a sentence; None: the strategy does not refuse. fault: what went
    wrong in the code of the strategy, as a sentence."""

    why: str | None = None
    fault: str = ""
