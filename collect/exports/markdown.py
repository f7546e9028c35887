"""Exports the tables as Markdown in GitHub's syntax, all in one file. Special characters of Markdown are escaped."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from collect.export import Export
from collect.reading.load import LoadedMatrix
from collect.report import summary_tables
from collect.summary import Summary
from shardlab.files import files
from shardlab.terminal import notation, printable
from shardlab.terminal.table import Table

# Characters that are escaped with a backslash (GitHub Flavored Markdown 0.29, section 2.4): punctuation that has a meaning in
# Markdown, characters with which a list item can begin (section 5.2), and $, with which a formula begins on GitHub.
_SPECIAL_CHARACTERS = re.compile(r"([\\`*_\[\]#<>|~$&]|^[-+]|(?<=^\d)[.)])")
_SPACES_PATTERN = re.compile(r" +")


@lru_cache(maxsize=4096)  # saves time, because many cells of a table have the same text
def escape_markdown(text: str) -> str:
    """The text in one line, with special characters of Markdown escaped."""
    return _SPECIAL_CHARACTERS.sub(r"\\\1", _SPACES_PATTERN.sub(" ", printable.clean_to_one_line(text)).strip())


def write_tables(_loaded: LoadedMatrix, summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write one Markdown file with all tables."""
    page_parts = [f"# {escape_markdown(summary_tables.make_report_title(summary))}", notation.format_time(summary.created_s)]
    page_parts += ["\n".join(f"- {escape_markdown(remark)}" for remark in summary_tables.list_general_remarks(summary))]
    for table in summary_tables.make_text_tables(summary):
        page_parts += [f"**{escape_markdown(table.title)}**", _render_table(table)]
    files.write_atomic(folder / "summary.md", ("\n\n".join(page_parts) + "\n").encode())


def _render_table(table: Table[Any]) -> str:
    rule_cells = ["---:" if is_number else "---" for is_number in table.number_columns]
    lines = [list(map(escape_markdown, table.headings)), rule_cells, *(list(map(escape_markdown, row)) for row in table.texts)]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


EXPORT = Export(
    name="markdown",
    summary="the tables of the summary, claims and reported numbers, in GitHub's syntax: one file",
    written_names=frozenset({"summary.md"}),
    write=write_tables,
)
