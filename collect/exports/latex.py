"""LaTeX: one file a table, for \\input under \\usepackage{booktabs, longtable}; what means something to TeX is escaped."""

from __future__ import annotations

import re
from pathlib import Path

from collect import prose
from collect.export import Export
from collect.load import Loaded
from collect.prose import TextTable
from collect.summary import Summary
from shardlab import files

_MARKS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    '"': r"{\char34}",  # a short-hand of its own in some languages of babel
    "[": "{[}", "*": "{*}",  # after the \\ of the row before they would belong to it
    "±": r"\ensuremath{\pm}", "×": r"\ensuremath{\times}", "²": r"\ensuremath{^2}", "µ": r"\ensuremath{\mu}",
}  # fmt: skip
_LIGATURE = re.compile(r"([-,'])(?=\1)")  # two of these would become one other sign
_SPACE = re.compile(r"[\s\x00-\x1f\x7f]+")
_HEAD = "% Needs \\usepackage{booktabs, longtable}.\n"


def escape(text: str) -> str:
    """Text that is set as it is, in one line."""
    marked = "".join(_MARKS.get(char, char) for char in _SPACE.sub(" ", text).strip())
    return _LIGATURE.sub(r"\1{}", marked)


def write(_loaded: Loaded, summary: Summary, folder: Path, _place: Path) -> None:
    for table in prose.tables(summary):
        said = escape(". ".join([prose.title(summary), table.title, *prose.about(summary)]))
        label = re.sub(r"[^A-Za-z0-9]+", "-", f"{summary.matrix}-{table.name}")
        caption = rf"\caption{{{said}.}}\label{{tab:{label}}}"
        draw = _long if table.long else _floating
        files.write_atomic(folder / f"{table.name}.tex", (_HEAD + draw(table, caption)).encode())


def _floating(table: TextTable, caption: str) -> str:
    aligned = "".join("r" if place in table.numbers else "l" for place in range(len(table.headings)))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering\footnotesize",
            caption,
            rf"\begin{{tabular}}{{{aligned}}}",
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


def _long(table: TextTable, caption: str) -> str:
    """Sentences and many rows: columns that break lines, over as many pages as it takes."""
    width = round(0.7 / len(table.long), 2)
    wide = rf"p{{{width / 2 if len(table.headings) > 5 else width}\linewidth}}"
    aligned = "".join(
        wide if place in table.long else "r" if place in table.numbers else "l" for place in range(len(table.headings))
    )
    return "\n".join(
        [
            r"\begingroup\footnotesize",
            rf"\begin{{longtable}}{{{aligned}}}",
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


def _line(cells: list[str]) -> str:
    return " & ".join(map(escape, cells)) + r" \\"


EXPORT = Export(
    name="latex",
    summary="the summary's tables, claims and reported numbers: booktabs, one file a table",
    holds=frozenset(f"{name}.tex" for name in ("summary", "times", "memory", "sent", "claims", "reported")),
    write=write,
)
