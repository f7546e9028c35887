"""Checks, before anything is queued, that the data sets of the cells are where their runs will read them.

    python -m jobs.datasets --json --workspace DIR

`jobs plan` runs this command on a cluster's controller. It reads a Question from standard input and prints what is missing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jobs import forward
from jobs.render import Source
from shardlab import away, console
from shardlab.cell import Cell
from shardlab.errors import InputError, ShardlabError
from shardlab.workspace import Workspace
from trainers.data import places


class Found(msgspec.Struct, frozen=True):
    """missing: a sentence for each missing data set. unknown: why it is not known which data sets are missing, or ''."""

    missing: list[str] = []
    unknown: str = ""


class Question(msgspec.Struct, frozen=True):
    """Asks for data sets. shared, data_path: as in the cluster file. options: the options of each cell."""

    shared: str | None
    data_path: str | None
    options: list[dict[str, Any]]


def look(cells: Sequence[Cell], source: Source, workspace: Workspace) -> Found:
    """Which data sets of these cells are missing. Files of another machine say nothing about the nodes of a cluster."""
    where, options = source.where, [cell.options for cell in cells]
    names = _names(options)
    if not names:
        return Found()
    question = Question(where.storage.shared, where.data.path, options)
    if source.scheduler == "local":
        return Found(_missing(options, workspace.data(where.data.path)))
    if forward.is_here(where):
        return answer(question, workspace)
    try:
        there = away.known(workspace)
        if there is None or there.cluster != where.name:
            there = away.of(workspace, where)
        return there.ask("jobs.datasets", [], Found, given=msgspec.json.encode(question))
    except ShardlabError as error:
        why = str(error).rstrip(".")
        return Found(unknown=f"cannot check from here whether the cluster {where.name} has the data sets {names}: {why}.")


def answer(question: Question, workspace: Workspace) -> Found:
    """Answer on a cluster's controller, which sees the storage that all nodes share, but not the nodes' own disks."""
    data_path, shared = workspace.data(question.data_path), question.shared
    if shared is not None and data_path.resolve().is_relative_to(Path(shared).resolve()):
        return Found(_missing(question.options, data_path))
    return Found(
        unknown=f"cannot check from here whether every node has the data sets {_names(question.options)}: {data_path} is not "
        "on storage that all nodes share. `provision` checks each node for the data sets in data.sets of the cluster file."
    )


def must_be_there(found: Found) -> None:
    """Raises InputError that lists every data set that is missing."""
    if found.missing:
        raise InputError("\n".join([*found.missing, "With --scale tiny every cell reads synthetic data."]))


def _missing(options: Sequence[dict[str, Any]], data_path: Path) -> list[str]:
    """A sentence for each data set that is not on this machine's disk, for cells with these options."""
    wanted = Counter(place for one in options if (place := places.of(one, data_path)) is not None)
    absent = [(place, count) for place, count in wanted.items() if not place.path.exists()]
    return [f"{count} of {len(options)} cell(s) read {place.name}: {place.refusal}" for place, count in absent]


def _names(options: Sequence[dict[str, Any]]) -> str:
    """The data sets that cells with these options read from files, in one list for a sentence."""
    return ", ".join(sorted({place.name for one in options if (place := places.of(one, Path())) is not None}))


def main() -> int:
    """Answer a question from another machine."""
    arguments = console.Parser(prog="python -m jobs.datasets", parents=[console.common_options()]).parse_args()
    try:
        question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    except msgspec.DecodeError as error:
        raise InputError(f"standard input: is not a question from this version of shardlab: {error}.") from None
    found = answer(question, Workspace.find(getattr(arguments, "workspace", None)))
    console.Output.of(arguments).document(found)
    return 0


if __name__ == "__main__":
    sys.exit(console.run(main))
