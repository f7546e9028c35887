"""The description of a strategy that a file of the workspace defines (WORKSPACE/strategies/NAME.py).

`jobs` uses this description and never executes the file itself; `python -m trainers` executes the file in a process of its own.
"""

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
    """The data of a strategy. Its functions stay in its file; only processes of trainers execute this file.

    code: the digest of the files that define the strategy.
    file: the path of the defining file in the workspace from which the run was submitted.
    The other fields mean the same as in trainers.strategy.Strategy.
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
    """The answer of `python -m trainers describe` about a file of strategies.

    strategies: the strategies that the file defines. fault: why the file defines no strategy, as a sentence; else empty.
    """

    strategies: list[OwnStrategy] = []
    fault: str = ""


class RefusalQuestion(msgspec.Struct, frozen=True):
    """A question to `python -m trainers refuse`, sent as a line of JSON: does this strategy refuse this cell?

    strategy: the name of the strategy. cell: a resolved cell. own_workload: the workload of the cell, if a file of the
    workspace defines it.
    """

    strategy: str
    cell: Cell
    own_workload: OwnWorkload | None = None


class RefusalAnswer(msgspec.Struct, frozen=True):
    """The answer to a RefusalQuestion, sent as a line of JSON.

    why: the reason for the refusal, as a sentence; None: the strategy does not refuse the cell.
    fault: the error in the code of the strategy, as a sentence; else empty.
    """

    why: str | None = None
    fault: str = ""
