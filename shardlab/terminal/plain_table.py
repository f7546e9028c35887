"""Tables as aligned lines of text, for files and pipes. `shardlab.terminal.rich_console.draw_table` draws tables on a
terminal."""

from __future__ import annotations

from typing import Any

import msgspec

from shardlab.terminal import printable
from shardlab.terminal.table import Row, Table

COLUMN_GAP = 2  # spaces between two columns
LEAST_SENTENCE = 36  # the least width of a column of sentences, in characters


def fit_table(table: Table[Row], width: int) -> Table[Row]:
    """The table without its empty columns, and with as many of the others as fit into a line of a terminal.

    The columns with the highest priority are left out first. A column of sentences is folded into several lines, or left out if
    it would have less than LEAST_SENTENCE characters. Columns without a priority that hold no sentences are never left out.
    width: of the terminal, in characters.
    """
    row_texts = table.texts
    column_widths = [max(display_width(text) for text in column) for column in zip(table.headings, *row_texts, strict=True)]
    shown_indexes = [
        index
        for index, column in enumerate(table.columns)
        if any(row_text[index] for row_text in row_texts) or not (column.priority or column.is_sentence)
    ]

    def measure_line() -> int:
        return sum(column_widths[index] + COLUMN_GAP for index in shown_indexes if not table.columns[index].is_sentence)

    while (
        measure_line() - COLUMN_GAP > width
        and table.columns[last := max(shown_indexes, key=lambda i: table.columns[i].priority)].priority
    ):
        shown_indexes.remove(last)
    line_width = measure_line()
    kept_columns = [
        table.columns[index]
        for index in shown_indexes
        if not table.columns[index].is_sentence or line_width + min(column_widths[index], LEAST_SENTENCE) <= width
    ]
    return msgspec.structs.replace(table, columns=kept_columns)


def format_table(table: Table[Any]) -> str:
    """A table as text, one line for each row."""
    right_aligned = table.number_columns
    cell_rows = [
        [printable.clean_to_one_line(cell.replace("\n", "; ")) for cell in row] for row in [table.headings, *table.texts]
    ]
    column_widths = [max(display_width(cell) for cell in column) for column in zip(*cell_rows, strict=True)]
    padded_rows = [
        (" " * COLUMN_GAP).join(
            " " * (column_width - display_width(cell)) + cell
            if is_right_aligned
            else cell + " " * (column_width - display_width(cell))
            for cell, column_width, is_right_aligned in zip(line, column_widths, right_aligned, strict=True)
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
