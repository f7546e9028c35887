"""Adds to an error the stage of the run in which it happened: building, proving or training.

The stage tells the user what to change: a run that runs out of memory while building needs another solution than a run that
runs out of memory while training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Stage = Literal["building", "proving", "training"]
_NOTE = "shardlab: the error happened while "


@contextmanager
def note_stage(name: Stage) -> Iterator[None]:
    """Add a note that names the stage to any error that is raised in the `with` block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{_NOTE}{name}")
        raise


def find_stage_of_error(error: BaseException) -> str | None:
    """The name of the stage in which an error happened; None if it happened outside of all stages."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)), None)
