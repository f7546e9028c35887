"""Exports the tables as LaTeX, one file per table, which a paper includes with \\input. Special characters are escaped.

The first line of each file names the LaTeX packages that the table needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from collect.export import Export
from collect.reading.load import Loaded
from collect.report import text_tables
from collect.report.text_table import TextTable
from collect.summary import Summary
from shardlab.files import files
from shardlab.terminal import printable

_MARKS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': r"{\char34}",  # in some languages of babel, " begins a shorthand
    "[": "{[}", "*": "{*}",  # at the start of a row, LaTeX would read [ and * as arguments of the \\ that ends the row before
    "±": r"\ensuremath{\pm}", "×": r"\ensuremath{\times}", "²": r"\ensuremath{^2}", "µ": r"\ensuremath{\mu}",
}  # fmt: skip
_BY_CODE = str.maketrans(_MARKS)
_LIGATURE = re.compile(r"([-,'])(?=\1)")  # LaTeX would replace two of these characters in a row by one other character
_SPACE = re.compile(r" +")
_HEAD = "% Needs \\usepackage{array, booktabs, longtable}.\n"
_PAGE = 40  # the most rows that fit on one page
# Widths in letters. _LINES: for each font size, the letters that fit on a line of an article. _SENTENCE: the width up to which
# a column is widened; longer texts wrap. _GAP: the space between two columns, with a reserve for wide letters.
_LINES = {"footnotesize": 78, "scriptsize": 88, "tiny": 104}
_SENTENCE, _GAP = 60, 2


@lru_cache(maxsize=4096)  # saves time, because many cells of a table have the same text
def escape(text: str) -> str:
    """The text in one line, with special characters escaped so that LaTeX prints them."""
    return _LIGATURE.sub(r"\1{}", _SPACE.sub(" ", printable.one_line(text)).strip().translate(_BY_CODE))


def write(_loaded: Loaded, summary: Summary, folder: Path, _place: Path) -> None:
    """Write one LaTeX file for each table."""
    for table in text_tables.tables(summary):
        said = escape(". ".join([text_tables.title(summary), table.title, *text_tables.about(summary)]))
        label = re.sub(r"[^A-Za-z0-9]+", "-", f"{summary.matrix}-{table.name}")
        caption = rf"\caption{{{said}.}}\label{{tab:{label}}}"
        draw = _over_pages if table.long or len(table.rows) > _PAGE else _floating
        files.write_atomic(folder / f"{table.name}.tex", (_HEAD + draw(table, caption)).encode())


def _floating(table: TextTable, caption: str) -> str:
    size, columns = _columns(table)
    return "\n".join(
        [
            r"\begin{table}",
            rf"\centering\{size}\setlength{{\tabcolsep}}{{2pt}}",
            caption,
            r"\begin{tabular}{",
            *columns,
            "}",
            r"\toprule",
            _line(table.headings),
            r"\midrule",
            *map(_line, table.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _over_pages(table: TextTable, caption: str) -> str:
    size, columns = _columns(table)
    return "\n".join(
        [
            rf"\begingroup\{size}\setlength{{\tabcolsep}}{{2pt}}",
            r"\setlength{\LTcapwidth}{\linewidth}",
            r"\begin{longtable}{",
            *columns,
            "}",
            rf"{caption}\\",
            r"\toprule",
            _line(table.headings),
            r"\midrule",
            r"\endhead",
            *map(_line, table.rows),
            r"\bottomrule",
            r"\end{longtable}",
            r"\endgroup",
            "",
        ]
    )


def _columns(table: TextTable) -> tuple[str, list[str]]:
    """Choose the font size and the widths of the columns of a table. Returns (font size, LaTeX specification of each column).

    If the widest cells of all columns together fit on a line, each column is as wide as its widest cell. Otherwise the columns
    together fill the line, and their text wraps.
    """
    columns = list(zip(table.headings, *table.rows, strict=True))
    widest = [max(map(len, column)) + _GAP for column in columns]
    if sum(widest) <= _LINES["footnotesize"]:
        return "footnotesize", ["  r" if place in table.numbers else "  l" for place in range(len(columns))]
    least = [_longest(column, whole=place in table.numbers) + _GAP for place, column in enumerate(columns)]
    if sum(least) > _LINES["tiny"]:
        least = [_longest(column, whole=False) + _GAP for column in columns]
    asked = [max(min(most, _SENTENCE) - word, 0) for most, word in zip(widest, least, strict=True)]
    size = next((name for name, line in _LINES.items() if line >= sum(least)), "tiny")
    room = max(_LINES[size] - sum(least), 0) / max(sum(asked), 1)
    wide = [word + more * room for word, more in zip(least, asked, strict=True)]
    return size, [_broken(letters / sum(wide), place in table.numbers) for place, letters in enumerate(wide)]


def _longest(column: Sequence[str], *, whole: bool) -> int:
    """The number of letters of the longest word in a column.

    whole: whether a cell counts as one word, so that a number and its interval stay on the same line.
    """
    heading, *cells = column
    words = [*heading.split(), *(cells if whole else (word for cell in cells for word in cell.split()))]
    return max(map(len, words), default=0)


def _broken(share: float, is_number: bool) -> str:
    """The LaTeX specification of a column that wraps its text. share: the part of the line that the column fills, from 0 to
    1."""
    side = "left" if is_number else "right"
    return rf"  >{{\ragged{side}\arraybackslash}}p{{\dimexpr {share:.4f}\linewidth-2\tabcolsep}}"


def _line(cells: list[str]) -> str:
    return " & ".join(map(escape, cells)) + r" \\"


EXPORT = Export(
    name="latex",
    summary="the tables of the summary, claims and reported numbers, for booktabs: one file per table",
    holds=frozenset(f"{name}.tex" for name in ("summary", "times", "memory", "sent", "claims", "reported")),
    write=write,
)
