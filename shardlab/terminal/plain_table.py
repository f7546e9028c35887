"""Tables as aligned lines of text, for files and pipes. `shardlab.terminal.rich_console.draw_table` draws tables on a
terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from shardlab.terminal import printable
from shardlab.terminal.table import LONGEST_LINE, Column, Row, Table

COLUMN_GAP = 2  # spaces between two columns
NARROWEST_FOLDED = 24  # characters; of a folded column in a table that otherwise does not fit
LONGEST_COMMON = 12  # characters of a text that the line about columns that are left out has
MOST_HEADING_LINES = 3  # of a heading that is folded


def fit_table(table: Table[Row], terminal_width: int) -> Table[Row]:
    """The table without its empty columns, and with as many of the others as fit into a line of a terminal.

    Sentences and other long texts are folded between words, no other text. If the whole table does not fit, long headings get
    several lines, and a folded column may become narrower than LONGEST_LINE, down to NARROWEST_FOLDED or its longest word. Then
    columns are left out: first columns of sentences, then the columns with the highest priority, and among equals the last one.
    One column is always shown. terminal_width: of the terminal, in characters.
    """
    texts_of_column = list(zip(*table.texts, strict=True)) or [()] * len(table.columns)
    shown_indexes = [
        index
        for index, column in enumerate(table.columns)
        if any(texts_of_column[index]) or not (column.priority or column.is_sentence)
    ]
    text_widths = [
        max((measure_width(line) for text in texts for line in text.split("\n")), default=0) for texts in texts_of_column
    ]
    folded_columns = table.folded_columns
    least_widths = [
        min(text_width, LONGEST_LINE) if is_folded else text_width
        for text_width, is_folded in zip(text_widths, folded_columns, strict=True)
    ]
    headings = table.headings

    def measure_line() -> int:
        heading_widths = [max(map(measure_width, heading.split("\n"))) for heading in headings]
        return sum(max(least_widths[index], heading_widths[index]) + COLUMN_GAP for index in shown_indexes) - COLUMN_GAP

    if measure_line() > terminal_width:
        headings = [_fold_heading(heading, least_width) for heading, least_width in zip(headings, least_widths, strict=True)]
        for index, is_folded in enumerate(folded_columns):
            if is_folded and (surplus_width := measure_line() - terminal_width) > 0:
                narrowest_width = _find_narrowest_width(texts_of_column[index], least_widths[index])
                least_widths[index] = max(least_widths[index] - surplus_width, narrowest_width)
    hidden_indexes: list[int] = []
    while measure_line() > terminal_width and len(shown_indexes) > 1:
        hidden_indexes.append(
            max(shown_indexes, key=lambda index: (table.columns[index].is_sentence, table.columns[index].priority, index))
        )
        shown_indexes.remove(hidden_indexes[-1])
    kept_columns = [msgspec.structs.replace(table.columns[index], heading=headings[index], unit="") for index in shown_indexes]
    hidden_headings = [_name_hidden(table.columns[index], texts_of_column[index]) for index in sorted(hidden_indexes)]
    return msgspec.structs.replace(table, columns=kept_columns, hidden=[*table.hidden, *filter(None, hidden_headings)])


def _find_narrowest_width(cell_texts: Sequence[str], least_width: int) -> int:
    """How narrow a folded column may become: as its longest word, unless this word is broken at `least_width` too."""
    longest_word = max((measure_width(word) for text in cell_texts for word in text.split()), default=0)
    return min(least_width, NARROWEST_FOLDED if longest_word > least_width else max(NARROWEST_FOLDED, longest_word))


def _name_hidden(column: Column[Any], cell_texts: Sequence[str]) -> str:
    """The heading of a column that is left out, with a short text that all rows have: `State (completed)`."""
    is_common = len({*cell_texts}) == 1 and 0 < len(cell_texts[0]) <= LONGEST_COMMON
    common_text = f" ({f'{cell_texts[0]} {column.unit}'.rstrip()})" if column.heading and is_common else ""
    return column.heading.replace("\n", " ") + common_text


def _fold_heading(heading: str, column_width: int) -> str:
    """The heading in at most MOST_HEADING_LINES lines, which are broken between words and as short as possible.

    column_width: the width of the column without its heading."""
    line_width = max(column_width, *map(measure_width, heading.split()), 1)
    while len(lines := textwrap.wrap(heading, line_width, break_long_words=False, break_on_hyphens=False)) > MOST_HEADING_LINES:
        line_width += 1
    return "\n".join(lines)


def format_table(table: Table[Any]) -> str:
    """A table as text, one line for each row."""
    right_aligned = table.number_columns
    cell_rows = [
        [printable.clean_to_one_line(cell.replace("\n", "; ")) for cell in row] for row in [table.headings, *table.texts]
    ]
    column_widths = [max(measure_width(cell) for cell in column_texts) for column_texts in zip(*cell_rows, strict=True)]
    padded_rows = [
        (" " * COLUMN_GAP).join(
            " " * (column_width - measure_width(cell)) + cell
            if is_right_aligned
            else cell + " " * (column_width - measure_width(cell))
            for cell, column_width, is_right_aligned in zip(cell_texts, column_widths, right_aligned, strict=True)
        )
        for cell_texts in cell_rows
    ]
    return "".join(f"{padded_row.rstrip()}\n" for padded_row in padded_rows)


def measure_width(text: str) -> int:
    """The number of columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
