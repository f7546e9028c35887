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

from collect import figure, notation
from collect.figures import (
    accuracy,
    bandwidth,
    batch_scaling,
    breakdown,
    bubble,
    collectives,
    epoch_histogram,
    epoch_time,
    gpus,
    head_to_head,
    idle_causes,
    loss,
    memory,
    memory_by_run,
    memory_categories,
    memory_timeline,
    operator_differences,
    overlap,
    phases,
    scaling,
    sharding,
    slow_ranks,
    step_time,
    step_timeline,
    telemetry,
    throughput,
    utilization,
    why_slower,
)
from collect.findings import columns
from collect.findings.columns import Column
from collect.findings.row import CellRow
from collect.loading.load import Loaded
from collect.metric import menu
from collect.report import choice_text, palette, provenance, report_start, study_tables, terminal, truncation, verdict_text
from collect.summary import Summary
from shardlab import __version__, printable
from templates import render_page

TEMPLATE = "report/index.html.j2"
WIDE = (
    "telemetry", "gpus", "memory_timeline", "breakdown", "collectives", "operator_differences", "memory_categories", "sharding",
    "head_to_head", "step_timeline", "why_slower",
)  # fmt: skip  # figures that take a whole row
MOST_UNLIKE = 1.4  # ratio of the heights of two figures in a row
# in the order of the page
FIGURES: tuple[ModuleType, ...] = (
    head_to_head,
    throughput, scaling, batch_scaling, step_time, epoch_time, epoch_histogram, memory, memory_by_run, loss, accuracy,
    breakdown, why_slower, overlap, slow_ranks, collectives, bandwidth, idle_causes, phases,
    operator_differences, bubble, memory_categories, sharding, memory_timeline, utilization,
    step_timeline, telemetry, gpus,
)  # fmt: skip

# in the order of a reader's questions; each is a file of templates/report
SECTIONS = {
    "answer": "In short",
    "choices": "Which strategy to choose",
    "figures": "Figures",
    "summary": "All cells",
    "reported": "Reported and measured numbers",
    "study": "What the study leaves open",
    "also": "Other measurements",
    "traces": "Traces",
    "failures": "What did not complete",
    "losses": "Are the losses the same?",
    "instruments": "Cost of the instruments",
    "records": "Quality of the records",
    "runs": "Runs",
    "where": "Hosts and software",
    "reading": "Definitions of the metrics",
}


class DrawnFigure(msgspec.Struct, frozen=True):
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
    shown = truncation.of(summary)
    table = columns.table(summary.rows, shown.rows)
    label_of = summary.label_of
    drawn = drawings(loaded, summary)
    headline = _headline(drawn, [choice.workload for choice in report_start.choices(summary)])
    others = [one for one in drawn if headline is None or one.name != headline.name]
    head_to_head = [one for one in others if one.kind == "head_to_head"]
    figures = [one for one in others if one.kind != "head_to_head"]
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
        headline=headline,
        answer=report_start,
        claims=[report_start.claim(verdict, summary) for verdict in summary.verdicts],
        head_to_head=head_to_head,
        choices=choice_text,
        script_json=_script_json,
        number=notation.number,
        places=provenance.made_with(loaded),
        hosts=provenance.hosts(loaded),
        worst=provenance.worst_coverage(summary),
        traffic=provenance.traffic_rows(summary),
        metrics=menu(),
        defined={metric.name for metric in menu()},
        plotly=Markup(plotly_script()),
    )


def _sections(summary: Summary, figures: Sequence[DrawnFigure], table: columns.Table) -> list[tuple[str, str]]:
    """(name, title) of those that have something to say."""
    having: dict[str, Sequence[Any]] = {
        "figures": figures,
        "reported": summary.reported,
        "study": [*summary.assumed, *summary.notes],
        "also": table.further,
        "failures": summary.failures,
        "losses": summary.losses,
        "instruments": summary.instruments,
        "choices": choice_text.opened(summary),
        "traces": [*summary.rounding, *summary.collectives, *summary.waiting, *summary.steps, *summary.operators],
    }
    return [(name, title) for name, title in SECTIONS.items() if having.get(name, [title])]


def _headline(drawn: Sequence[DrawnFigure], workloads: Sequence[str]) -> DrawnFigure | None:
    """The figure that a report starts with: what strategies give for what they take, else how fast they are."""
    for kind in ("head_to_head", "throughput_per_s"):
        found = [one for one in drawn if one.kind == kind]
        if found:
            first = next((one for one in found if workloads and one.title.endswith(f", {workloads[0]}")), found[0])
            return msgspec.structs.replace(first, wide=False)  # what to choose stands beside it
    return None


def plotly_script() -> str:
    """plotly's own script, once for the page."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    assert "</script" not in script.lower()
    return script


def drawings(loaded: Loaded, summary: Summary) -> list[DrawnFigure]:
    """Every figure that has something to show, in the order of the page: all of one workload, then all of the next."""
    shown = truncation.of(summary)
    kept = {row.id for row in shown.rows}
    groups = figure.groups(Loaded(loaded.expansion, [cell for cell in loaded.cells if cell.id in kept]), shown)
    found = []
    for group in groups:
        drawn = [one for module in FIGURES if (one := module.draw(group)) is not None]
        of = f", {group.workload}" if len(groups) > 1 else ""
        cells = len(group.marks)
        more = f" Shown are the first {cells} of {cells + group.left_out:,} cells." if group.left_out else ""
        found += [_drawn(one, of, more, wide) for one, wide in in_rows(drawn)]
    return found


def in_rows(drawn: Sequence[figure.Figure]) -> list[tuple[figure.Figure, bool]]:
    """The figures in rows of two that are about as high, so that none leaves a hole beside another: (figure, whether it has the
    whole row). The order is kept but for the partner of each figure, which is the next one of a like height.
    """
    waiting = list(drawn)
    found: list[tuple[figure.Figure, bool]] = []
    while waiting:
        one = waiting.pop(0)
        partner = None if one.name in WIDE else next((other for other in waiting if _is_partner(one, other)), None)
        if partner is None:
            found.append((one, True))
        else:
            waiting.remove(partner)
            found += [(one, False), (partner, False)]
    return found


def _is_partner(one: figure.Figure, other: figure.Figure) -> bool:
    low, high = sorted((one.height_px, other.height_px))
    return other.name not in WIDE and high <= MOST_UNLIKE * low


def _drawn(found: figure.Figure, of: str, more: str, wide: bool) -> DrawnFigure:
    title = found.title + of
    name = re.sub(r"[^a-z0-9.-]+", "-", f"{found.name}{of}".replace("_", "-").lower())
    spec = {"data": found.data, "layout": found.layout, "picture": figure.picture(found, title, wide)}
    return DrawnFigure(
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


def _state_class(row: CellRow) -> str:
    """The state that decides a row's colour: the worst that it has."""
    known = [state for state in terminal.STYLES if state in row.states]
    return known[0] if known else next(iter(row.states), "unknown")
