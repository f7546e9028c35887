"""A table whose fields are all text, as the terminal, the page and the exports show it."""

from __future__ import annotations

import msgspec


class TextTable(msgspec.Struct, frozen=True):
    """A table whose fields are all text."""

    name: str
    """A short name, used as the name of a file."""
    title: str
    """The title that readers see."""
    headings: list[str]
    """The headings of the columns."""
    rows: list[list[str]]
    """For each row, the texts of its columns."""
    numbers: frozenset[int] = frozenset()
    """The indexes of the columns that contain numbers and are aligned to the right."""
    long: frozenset[int] = frozenset()
    """The indexes of the columns that contain sentences."""
