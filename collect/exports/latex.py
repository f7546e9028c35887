"""Exports the tables as LaTeX, one file per table, which a paper includes with \\input. Special characters are escaped.

The first line of each file names the LaTeX packages that the table needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from collect.export import Export
from collect.reading.load import LoadedMatrix
from collect.report import summary_tables
from collect.summary import Summary
from shardlab.files import files
from shardlab.terminal import printable
from shardlab.terminal.table import Table

_ESCAPE_BY_CHARACTER = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': r"{\char34}",  # in some languages of babel, " begins a shorthand
    "[": "{[}", "*": "{*}",  # at the start of a row, LaTeX would read [ and * as arguments of the \\ that ends the row before
    "±": r"\ensuremath{\pm}", "×": r"\ensuremath{\times}", "²": r"\ensuremath{^2}", "µ": r"\ensuremath{\mu}",
}  # fmt: skip
_ESCAPE_TABLE = str.maketrans(_ESCAPE_BY_CHARACTER)
_LIGATURE = re.compile(r"([-,'])(?=\1)")  # LaTeX would replace two of these characters in a row by one other character
_SPACES_PATTERN = re.compile(r" +")
_FILE_HEADER = "% Needs \\usepackage{array, booktabs, longtable}.\n"
_ROWS_PER_PAGE = 40  # the most rows that fit on one page
# Widths in letters. _LINE_LETTERS: for each font size, the letters that fit on a line of an article. _SENTENCE: the width up to
# which a column is widened; longer texts wrap. _GAP: the space between two columns, with a reserve for wide letters.
_LINE_LETTERS = {"footnotesize": 78, "scriptsize": 88, "tiny": 104}
_SENTENCE_LETTERS, _GAP_LETTERS = 60, 2


@lru_cache(maxsize=4096)  # saves time, because many cells of a table have the same text
def escape_latex(text: str) -> str:
    """The text in one line, with special characters escaped so that LaTeX prints them."""
    return _LIGATURE.sub(r"\1{}", _SPACES_PATTERN.sub(" ", printable.clean_to_one_line(text)).strip().translate(_ESCAPE_TABLE))


def write_tables(_loaded: LoadedMatrix, summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write one LaTeX file for each table."""
    for table in summary_tables.make_text_tables(summary):
        caption_text = escape_latex(
            ". ".join([summary_tables.make_report_title(summary), table.title, *summary_tables.list_general_remarks(summary)])
        )
        reference_label = re.sub(r"[^A-Za-z0-9]+", "-", f"{summary.matrix}-{table.name}")
        caption = rf"\caption{{{caption_text}.}}\label{{tab:{reference_label}}}"
        render_table = (
            _render_multi_page_table if _has_sentences(table) or len(table.rows) > _ROWS_PER_PAGE else _render_floating_table
        )
        files.write_atomic(folder / f"{table.name}.tex", (_FILE_HEADER + render_table(table, caption)).encode())


def _has_sentences(table: Table[Any]) -> bool:
    return any(column.is_sentence for column in table.columns)


def _render_floating_table(table: Table[Any], caption: str) -> str:
    font_size, column_specs = _choose_columns(table)
    return "\n".join(
        [
            r"\begin{table}",
            rf"\centering\{font_size}\setlength{{\tabcolsep}}{{2pt}}",
            caption,
            r"\begin{tabular}{",
            *column_specs,
            "}",
            r"\toprule",
            _format_table_line(table.headings),
            r"\midrule",
            *map(_format_table_line, table.texts),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _render_multi_page_table(table: Table[Any], caption: str) -> str:
    font_size, column_specs = _choose_columns(table)
    return "\n".join(
        [
            rf"\begingroup\{font_size}\setlength{{\tabcolsep}}{{2pt}}",
            r"\setlength{\LTcapwidth}{\linewidth}",
            r"\begin{longtable}{",
            *column_specs,
            "}",
            rf"{caption}\\",
            r"\toprule",
            _format_table_line(table.headings),
            r"\midrule",
            r"\endhead",
            *map(_format_table_line, table.texts),
            r"\bottomrule",
            r"\end{longtable}",
            r"\endgroup",
            "",
        ]
    )


def _choose_columns(table: Table[Any]) -> tuple[str, list[str]]:
    """Choose the font size and the widths of the columns of a table. Returns (font size, LaTeX specification of each column).

    If the widest cells of all columns together fit on a line, each column is as wide as its widest cell. Otherwise the columns
    together fill the line, and their text wraps.
    """
    column_texts = list(zip(table.headings, *table.texts, strict=True))
    are_numbers = table.number_columns
    widest_letters = [max(map(len, column)) + _GAP_LETTERS for column in column_texts]
    if sum(widest_letters) <= _LINE_LETTERS["footnotesize"]:
        return "footnotesize", ["  r" if is_number else "  l" for is_number in are_numbers]
    least_letters = [
        _measure_longest_word(column, whole_cells=is_number) + _GAP_LETTERS
        for column, is_number in zip(column_texts, are_numbers, strict=True)
    ]
    if sum(least_letters) > _LINE_LETTERS["tiny"]:
        least_letters = [_measure_longest_word(column, whole_cells=False) + _GAP_LETTERS for column in column_texts]
    extra_letters = [
        max(min(widest, _SENTENCE_LETTERS) - least, 0) for widest, least in zip(widest_letters, least_letters, strict=True)
    ]
    font_size = next((name for name, line_letters in _LINE_LETTERS.items() if line_letters >= sum(least_letters)), "tiny")
    extra_scale = max(_LINE_LETTERS[font_size] - sum(least_letters), 0) / max(sum(extra_letters), 1)
    widths = [least + extra * extra_scale for least, extra in zip(least_letters, extra_letters, strict=True)]
    return font_size, [
        _format_wrapped_column(letters / sum(widths), is_number) for letters, is_number in zip(widths, are_numbers, strict=True)
    ]


def _measure_longest_word(column_texts: Sequence[str], *, whole_cells: bool) -> int:
    """The number of letters of the longest word in a column.

    whole_cells: whether a cell counts as one word, so that a number and its interval stay on the same line.
    """
    heading, *cell_texts = column_texts
    words = [*heading.split(), *(cell_texts if whole_cells else (word for cell in cell_texts for word in cell.split()))]
    return max(map(len, words), default=0)


def _format_wrapped_column(line_share: float, is_number: bool) -> str:
    """The LaTeX specification of a column that wraps its text. line_share: the part of the line that the column fills, from 0
    to 1."""
    aligned_side = "left" if is_number else "right"
    return rf"  >{{\ragged{aligned_side}\arraybackslash}}p{{\dimexpr {line_share:.4f}\linewidth-2\tabcolsep}}"


def _format_table_line(cell_texts: list[str]) -> str:
    return " & ".join(map(escape_latex, cell_texts)) + r" \\"


EXPORT = Export(
    name="latex",
    summary="the tables of the summary, claims and reported numbers, for booktabs: one file per table",
    written_names=frozenset(f"{name}.tex" for name in ("summary", "times", "memory", "sent", "claims", "reported")),
    write=write_tables,
)
