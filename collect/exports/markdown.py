"""Exports the tables as Markdown in GitHub's syntax, all in one file. Special characters of Markdown are escaped."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from collect import notation
from collect.export import Export
from collect.reading.load import Loaded
from collect.report import text_tables
from collect.report.text_table import TextTable
from collect.summary import Summary
from shardlab.files import files
from shardlab.terminal import printable

# Characters that are escaped with a backslash (GitHub Flavored Markdown 0.29, section 2.4): punctuation that has a meaning in
# Markdown, characters with which a list item can begin (section 5.2), and $, with which a formula begins on GitHub.
_MARKS = re.compile(r"([\\`*_\[\]#<>|~$&]|^[-+]|(?<=^\d)[.)])")
_SPACE = re.compile(r" +")


@lru_cache(maxsize=4096)  # saves time, because many cells of a table have the same text
def escape(text: str) -> str:
    """The text in one line, with special characters of Markdown escaped."""
    return _MARKS.sub(r"\\\1", _SPACE.sub(" ", printable.one_line(text)).strip())


def write(_loaded: Loaded, summary: Summary, folder: Path, _place: Path) -> None:
    """Write one Markdown file with all tables."""
    parts = [f"# {escape(text_tables.title(summary))}", notation.moment(summary.created_s)]
    parts += ["\n".join(f"- {escape(remark)}" for remark in text_tables.about(summary))]
    for table in text_tables.tables(summary):
        parts += [f"**{escape(table.title)}**", _drawn(table)]
    files.write_atomic(folder / "summary.md", ("\n\n".join(parts) + "\n").encode())


def _drawn(table: TextTable) -> str:
    rule = ["---:" if place in table.numbers else "---" for place in range(len(table.headings))]
    rows = [list(map(escape, table.headings)), rule, *(list(map(escape, row)) for row in table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


EXPORT = Export(
    name="markdown",
    summary="the tables of the summary, claims and reported numbers, in GitHub's syntax: one file",
    holds=frozenset({"summary.md"}),
    write=write,
)
