"""Tables as aligned lines of text, for files and pipes. `shardlab.terminal.rich_console.draw_table` draws tables on a
terminal."""

from __future__ import annotations

from typing import Any

from shardlab.terminal import printable
from shardlab.terminal.table import Table


def format_table(table: Table[Any]) -> str:
    """A table as text, one line for each row."""
    right_aligned = table.number_columns
    cell_rows = [[printable.one_line(cell.replace("\n", "; ")) for cell in row] for row in [table.headings, *table.texts]]
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
