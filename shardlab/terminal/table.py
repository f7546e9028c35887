"""A table: rows, and columns that say what they show of a row. The terminal, the pages of reports and the exports render it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

import msgspec

from shardlab.terminal import notation

Row = TypeVar("Row")
_SHOWN_BEFORE = 8  # if a text is cut in the middle, this many characters before the first difference are shown
MOST_NAMED = 3  # the most columns that the line below a table names
LONGEST_LINE = 36  # the most characters of a text that is never folded; the least width of a column of folded texts
_NUMERIC = re.compile(r"[-+]?[0-9]|\Z")  # matches a text that begins with a number or is empty


class CellText(msgspec.Struct, frozen=True):
    """A text of a table that has two parts."""

    value: str
    remark: str = ""
    """What a page shows in a fainter colour after the value, such as `± 2.1`."""

    def __str__(self) -> str:
        return f"{self.value} {self.remark}" if self.remark else self.value


class TextPiece(msgspec.Struct, frozen=True):
    """A piece of a text of a table, as a page shows it."""

    text: str
    """The text; a piece without text is left out."""
    link: str = ""
    """What the page links the piece to, as in `Column.link`."""
    style: str = ""
    """The CSS class of the piece."""
    spoken: str = ""
    """What a screen reader says in place of the text."""


class Column(msgspec.Struct, Generic[Row], frozen=True):
    """A column of a table: what it shows of a row, and how."""

    heading: str
    value: Callable[[Row], str | float | CellText | None] | None = None
    """The text or number of a row; None: not known. A column of `pieces` without `value` has their texts."""
    unit: str = ""
    """The unit of the numbers."""
    scale: float = 1.0
    """The numbers are divided by this factor, to be in the unit."""
    digits: int = 4
    """The least number of significant digits of a number that is not an integer."""
    is_signed: bool = False
    """Whether a positive number begins with +."""
    is_number: bool | None = None
    """Whether the column is aligned to the right; None: if it has no pieces, and each text begins with a number or is empty."""
    longest: int | None = None
    """The most characters of a text; a longer text is cut."""
    cut_texts: Mapping[str, str] = {}
    """How long texts are cut; a text that is not here is cut at its end. A table fills it, so that different texts stay
    different."""
    is_code: bool = False
    """Whether a page shows the texts as code."""
    link: Callable[[Row], str] | None = None
    """The id of the cell or run to which a page links the text, or # and the id of an element of the page; "" for no link."""
    pieces: Callable[[Row], Sequence[TextPiece]] | None = None
    """The pieces of the text. A page shows them in place of the text, with `separator` between."""
    separator: str = ""
    name: str = ""
    """The name of the metric or key in the column. A page links the heading of a metric to its definition."""
    state: Callable[[Row], str] | None = None
    """The state of a row, which decides the colour of the text on a page."""
    is_sentence: bool = False
    """Whether the texts are sentences, which need several lines."""
    priority: int = 0
    """On a narrow terminal, the columns with the highest priority are left out first, and among equals the last one."""

    @property
    def heading_with_unit(self) -> str:
        """The heading with the unit, in one line."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading

    def whole_text(self, row: Row) -> CellText:
        """The text of a row, not cut. The value is "" if it is not known."""
        if self.value is None:
            return CellText(
                self.separator.join(piece.text for piece in (self.pieces(row) if self.pieces else ()) if piece.text)
            )
        cell_value = self.value(row)
        if isinstance(cell_value, CellText):
            return cell_value
        if cell_value is None or isinstance(cell_value, str):
            return CellText(cell_value or "")
        is_integer = isinstance(cell_value, int) and self.scale == 1
        number_text = f"{cell_value:,}" if is_integer else notation.format_number(cell_value / self.scale, self.digits)
        return CellText(f"+{number_text}" if self.is_signed and cell_value > 0 else number_text)

    def is_cut(self, row: Row) -> bool:
        """Whether the text of a row is longer than the longest that is shown."""
        return self.longest is not None and len(self.whole_text(row).value) > self.longest

    def text(self, row: Row) -> CellText:
        """The text of a row, cut to the longest length."""
        cell_text = self.whole_text(row)
        if self.longest is None or len(cell_text.value) <= self.longest:
            return cell_text
        return CellText(self.cut_texts.get(cell_text.value) or f"{cell_text.value[: self.longest - 1]}…", cell_text.remark)


class Table(msgspec.Struct, Generic[Row], frozen=True):
    """Rows, and the columns that show them."""

    title: str
    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    name: str = ""
    """A short name, used as the name of a file and in links; "" if the table has none."""
    note: str = ""
    """Sentences about the table, for readers of a page."""
    most_rows: int | None = None
    """The most rows of each group that are shown; None: all."""
    group: Callable[[Row], str] = lambda row: ""
    """The group of a row, such as its cell."""
    has_group_headings: bool = False
    """Whether a page shows the name of each group above its rows."""
    styles: Sequence[str] = ()
    """The style of each row on a terminal."""
    hidden: Sequence[str] = ()
    """The headings of the columns for which the terminal is too narrow."""

    def __post_init__(self) -> None:
        """Cut the long texts of each column so that they stay different."""
        columns = [
            column
            if column.longest is None
            else msgspec.structs.replace(
                column, cut_texts=_cut_texts([column.whole_text(row).value for row in self.shown_rows], column.longest)
            )
            for column in self.columns
        ]
        msgspec.structs.force_setattr(self, "columns", columns)

    @property
    def shown_rows(self) -> Sequence[Row]:
        """The first `most_rows` rows of each group."""
        if self.most_rows is None:
            return self.rows
        count_by_group: Counter[str] = Counter()
        first_rows = []
        for row in self.rows:
            count_by_group[self.group(row)] += 1
            if count_by_group[self.group(row)] <= self.most_rows:
                first_rows.append(row)
        return first_rows

    @property
    def groups(self) -> dict[str, list[Row]]:
        """The shown rows under the names of their groups; all under "" if the groups have no headings."""
        rows_by_group: dict[str, list[Row]] = {}
        for row in self.shown_rows:
            rows_by_group.setdefault(self.group(row) if self.has_group_headings else "", []).append(row)
        return rows_by_group

    @property
    def left_out(self) -> int:
        """The number of rows that are not shown."""
        return len(self.rows) - len(self.shown_rows)

    @property
    def title_with_rest(self) -> str:
        """The title, and how many rows are not shown."""
        return "; ".join(filter(None, (self.title, f"{self.left_out:,} more in --json" if self.left_out else "")))

    @property
    def headings(self) -> list[str]:
        """The headings of the columns with their units."""
        return [column.heading_with_unit for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """For each row that is shown, the text of each column."""
        return [[str(column.text(row)) for column in self.columns] for row in self.shown_rows]

    @property
    def number_columns(self) -> list[bool]:
        """For each column, whether it has numbers and is aligned to the right."""
        shown_rows = self.shown_rows
        return [
            not column.pieces and all(_NUMERIC.match(column.text(row).value) for row in shown_rows)
            if column.is_number is None
            else column.is_number
            for column in self.columns
        ]

    @property
    def folded_columns(self) -> list[bool]:
        """For each column, whether its texts may be folded between words: sentences, and long texts that are no numbers."""
        return [
            column.is_sentence or (any(len(text) > LONGEST_LINE and " " in text for text in texts) and not is_number)
            for column, is_number, *texts in zip(self.columns, self.number_columns, *self.texts, strict=True)
        ]

    def describe_hidden(self, width: int) -> str:
        """A line that names the columns for which a terminal of this width has no room, and where they are; "" if it has."""
        if not (heading_names := list(dict.fromkeys(self.hidden))):
            return ""
        rest_clause = f" and {len(heading_names) - MOST_NAMED} more" if len(heading_names) > MOST_NAMED else ""
        return f"hidden at {width} columns: {'; '.join(heading_names[:MOST_NAMED])}{rest_clause} (wider terminal, --json)"


def _cut_texts(texts: Sequence[str], max_length: int) -> dict[str, str]:
    """Cut those texts that are longer than `max_length`: at the end, or if several texts have the same beginning, in the
    middle, where they begin to differ. Returns {text: the cut text}."""
    cut_texts = {text: f"{text[: max_length - 1]}…" for text in texts if len(text) > max_length}
    for _ in range(max_length):  # each round separates the texts that are still equal
        texts_by_cut: dict[str, list[str]] = {}
        for text, cut_text in cut_texts.items():
            texts_by_cut.setdefault(cut_text, []).append(text)
        if len(texts_by_cut) == len(cut_texts):
            break
        for equal_texts in texts_by_cut.values():
            indexed_letters = enumerate(zip(*equal_texts, strict=False))
            split_at = next((index for index, letters in indexed_letters if len({*letters}) > 1), min(map(len, equal_texts)))
            for text in equal_texts if len(equal_texts) > 1 else ():
                text_head, tail_start = text[: max_length // 2], max(max_length // 2, split_at - _SHOWN_BEFORE)
                text_tail = text[tail_start : tail_start + max_length - len(text_head) - 2]
                cut_texts[text] = f"{text_head}…{text_tail}{'…' if tail_start + len(text_tail) < len(text) else ''}"
    return cut_texts


def make_text_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str] = (),
    priorities: Mapping[str, int] | None = None,
) -> Table[Sequence[str]]:
    """A table of rows that are texts already, one for each heading. styles: the style of each row on a terminal. priorities:
    the priority of each column whose priority is not 0, by its heading."""
    columns: list[Column[Sequence[str]]] = [
        Column(heading, itemgetter(index), priority=(priorities or {}).get(heading, 0))
        for index, heading in enumerate(headings)
    ]
    return Table(title, columns, rows, styles=styles)
