"""A table whose fields are all text, as the terminal, the page and the exports show it."""

from __future__ import annotations

import msgspec


class TextTable(msgspec.Struct, frozen=True):
    """A table whose fields are all text.

    name: a short name, used as the name of a file. title: the title that readers see. headings: the headings of the columns.

    rows: for each row, the texts of its columns. numbers: the indexes of the columns that contain numbers and are aligned to
    the right. long: the indexes of the columns that contain sentences.
    """

    name: str
    title: str
    headings: list[str]
    rows: list[list[str]]
    numbers: frozenset[int] = frozenset()
    long: frozenset[int] = frozenset()
