"""Tables as aligned lines of text, for files and pipes. `shardlab.terminal.rich_console.drawn_table` draws tables on a
terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardlab.terminal import printable

_NUMERIC = re.compile(r"[-+]?[0-9]|\Z")  # matches a text that begins with a number or is empty


def of_numbers(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """For each column, whether all its cells are empty or begin with a number. Such a column is aligned to the right."""
    return [all(_NUMERIC.match(row[index]) for row in rows) for index in range(len(columns))]


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, one line for each row. columns: the heading of each column. rows: the cells of each row."""
    right = of_numbers(columns, rows)
    lines = [[printable.one_line(cell.replace("\n", "; ")) for cell in row] for row in [columns, *rows]]
    widths = [max(width(cell) for cell in column) for column in zip(*lines, strict=True)]
    set_ = [
        "  ".join(
            " " * (wide - width(cell)) + cell if to_right else cell + " " * (wide - width(cell))
            for cell, wide, to_right in zip(line, widths, right, strict=True)
        )
        for line in lines
    ]
    return "".join(f"{line.rstrip()}\n" for line in set_)


def width(text: str) -> int:
    """The number of columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
