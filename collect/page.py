"""The report as one self-contained page: what it shows is the summary's, how it looks is the template's."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from markupsafe import Markup

from collect import choice_text, columns, excerpt, figure, notation, palette, provenance, study_tables, terminal, verdict_text
from collect.columns import Column
from collect.figures import (
    accuracy,
    batch_scaling,
    breakdown,
    bubble,
    collectives,
    epoch_histogram,
    epoch_time,
    head_to_head,
    loss,
    memory,
    memory_by_run,
    memory_categories,
    memory_timeline,
    operator_differences,
    overlap,
    scaling,
    sharding,
    step_time,
    telemetry,
    throughput,
    utilization,
)
from collect.load import Loaded
from collect.metric import menu
from collect.row import Row
from collect.summary import Summary
from shardlab import __version__, printable
from templates import render_page

TEMPLATE = "report/index.html.j2"
WIDE = (
    "telemetry", "memory_timeline", "breakdown", "collectives", "operator_differences", "memory_categories", "sharding",
    "head_to_head",
)  # fmt: skip  # figures that take a whole row
# in the order of the page
FIGURES: tuple[ModuleType, ...] = (
    head_to_head,
    throughput, scaling, batch_scaling, step_time, epoch_time, epoch_histogram, memory, memory_by_run, loss, accuracy,
    breakdown, overlap, collectives, operator_differences, bubble, memory_categories, sharding, memory_timeline, utilization,
    telemetry,
)  # fmt: skip

# in the order of a reader's questions; each is a file of templates/report
SECTIONS = {
    "summary": "Summary",
    "choices": "Which to choose",
    "verdicts": "Verdicts",
    "figures": "Figures",
    "reported": "Reported beside measured",
    "study": "What the study leaves open",
    "also": "Also measured",
    "traces": "Traces",
    "failures": "What did not complete",
    "losses": "Same losses?",
    "instruments": "What looking cost",
    "records": "How good the records are",
    "runs": "Runs",
    "where": "What ran where",
    "reading": "How to read it",
}


class Drawn(msgspec.Struct, frozen=True):
    """A figure in its place. name: unique in the report, fit for a file; kind: that of its module; wide: it takes a whole row.

    spec: plotly's data and layout, and what its layout has besides where it stands alone, as a picture.
    """

    name: str
    kind: str
    title: str
    caption: str
    height_px: int
    wide: bool
    spec: dict[str, Any]


def draw(loaded: Loaded, summary: Summary, folder: Path, runs: Path) -> str:
    """The page for a report that will lie in `folder`; links to runs are relative, so that both can move together."""
    shown = excerpt.of(summary)
    table = columns.table(summary.rows, shown.rows)
    label_of = summary.label_of
    drawn = drawings(loaded, summary)
    head_to_head = [one for one in drawn if one.kind == "head_to_head"]
    figures = [one for one in drawn if one.kind != "head_to_head"]
    reported = verdict_text.reported(summary, label_of)
    place_of = {row.id: place for place, row in enumerate(shown.rows)}
    return render_page(
        TEMPLATE,
        printable.clean,
        summary=shown,
        whole=summary,
        version=__version__,
        created=notation.moment(summary.created_s),
        sections=_sections(shown, figures, table),
        light=palette.LIGHT,
        dark=palette.DARK,
        labels=[label_of[row.id] for row in shown.rows],
        label_of=label_of,
        place_of=place_of,
        text=verdict_text,
        reported=reported,
        redrawn=study_tables.redraw(summary.reported),
        remarks_of=lambda places: study_tables.remarks(summary.reported, [line.own for line in reported], places),
        metric_heading=study_tables.heading,
        table=table,
        runs_path=Path(os.path.relpath(runs, folder)).as_posix(),
        run_columns=_run_columns(table.columns),
        run_value=_run_value,
        state_class=_state_class,
        place_of_runs={cell.id: provenance.cell(cell) for cell in loaded.cells if cell.id in place_of},
        figures=figures,
        head_to_head=head_to_head,
        choices=choice_text,
        script_json=_script_json,
        number=notation.number,
        places=provenance.made_with(loaded),
        hosts=provenance.hosts(loaded),
        worst=provenance.worst_coverage(summary),
        metrics=menu(),
        defined={metric.name for metric in menu()},
        plotly=Markup(_bundle()),
    )


def _sections(summary: Summary, figures: Sequence[Drawn], table: columns.Table) -> list[tuple[str, str]]:
    """(name, title) of those that have something to say."""
    having: dict[str, Sequence[Any]] = {
        "verdicts": summary.verdicts,
        "figures": figures,
        "reported": summary.reported,
        "study": [*summary.assumed, *summary.notes],
        "also": table.further,
        "failures": summary.failures,
        "losses": summary.losses,
        "instruments": summary.instruments,
        "choices": choice_text.opened(summary),
        "traces": [*summary.rounding, *summary.collectives, *summary.operators],
    }
    return [(name, title) for name, title in SECTIONS.items() if having.get(name, [title])]


def _bundle() -> str:
    """plotly's own script, once for the page."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    assert "</script" not in script.lower()
    return script


def drawings(loaded: Loaded, summary: Summary) -> list[Drawn]:
    """Every figure that has something to show, in the order of the page: all of one workload, then all of the next."""
    shown = excerpt.of(summary)
    kept = {row.id for row in shown.rows}
    groups = figure.groups(Loaded(loaded.expansion, [cell for cell in loaded.cells if cell.id in kept]), shown)
    found = []
    for group in groups:
        drawn = [one for module in FIGURES if (one := module.draw(group)) is not None]
        narrow = [one.name for one in drawn if one.name not in WIDE]
        alone = narrow[-1:] if len(narrow) % 2 else []  # two stand side by side: the last of an odd number has no partner
        of = f", {group.workload}" if len(groups) > 1 else ""
        more = f" Of {len(group.marks) + group.left_out:,} cells the first {len(group.marks)}." if group.left_out else ""
        found += [_drawn(one, of, more, one.name in (*WIDE, *alone)) for one in drawn]
    return found


def _drawn(found: figure.Figure, of: str, more: str, wide: bool) -> Drawn:
    title = found.title + of
    name = re.sub(r"[^a-z0-9.-]+", "-", f"{found.name}{of}".replace("_", "-").lower())
    spec = {"data": found.data, "layout": found.layout, "picture": figure.picture(found, title, wide)}
    return Drawn(
        name, found.name, title, found.caption + more, found.height_px, wide, printable.mapped(spec, printable.one_line)
    )


def _script_json(value: Any) -> Markup:
    """JSON in which no text can end the script element that it stands in."""
    text = msgspec.json.encode(value).decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _run_columns(shown: Sequence[Column]) -> list[Column]:
    """The measured columns that a single run has too."""
    return [column for column in shown if column.name in ("throughput_per_s", "step_time_ms", "final_loss")]


def _run_value(metrics: dict[str, float], name: str) -> str:
    return notation.number(metrics[name]) if name in metrics else ""


def _state_class(row: Row) -> str:
    """The state that decides a row's colour: the worst that it has."""
    known = [state for state in terminal.STYLES if state in row.states]
    return known[0] if known else next(iter(row.states), "unknown")
