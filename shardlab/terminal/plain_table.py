"""Tables as aligned lines of text, for files and pipes. `shardlab.terminal.rich_console.draw_table` draws tables on a
terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardlab.terminal import printable

_NUMERIC = re.compile(r"[-+]?[0-9]|\Z")  # matches a text that begins with a number or is empty


def numeric_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """For each column, whether all its cells are empty or begin with a number. Such a column is aligned to the right."""
    return [all(_NUMERIC.match(row[index]) for row in rows) for index in range(len(columns))]


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, one line for each row. columns: the heading of each column. rows: the cells of each row."""
    right_aligned = numeric_columns(columns, rows)
    cell_rows = [[printable.one_line(cell.replace("\n", "; ")) for cell in row] for row in [columns, *rows]]
    widths = [max(display_width(cell) for cell in column) for column in zip(*cell_rows, strict=True)]
    padded_rows = [
        "  ".join(
            " " * (column_width - display_width(cell)) + cell
            if is_right_aligned
            else cell + " " * (column_width - display_width(cell))
            for cell, column_width, is_right_aligned in zip(line, widths, right_aligned, strict=True)
        )
        for line in cell_rows
    ]
    return "".join(f"{line.rstrip()}\n" for line in padded_rows)


def display_width(text: str) -> int:
    """The number of columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
