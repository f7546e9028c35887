"""Renders the report as one self-contained HTML page: the content comes from the summary, the layout from a Jinja template."""

from __future__ import annotations

import base64
import gzip
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from markupsafe import Markup

from collect import figure
from collect.figures import (
    allocator,
    bubble,
    cell_rows,
    head_to_head,
    memory_over_time,
    memory_parts,
    operators,
    rates,
    scaling,
    step_parts,
    telemetry,
    timelines,
    training,
    why_slower,
)
from collect.findings import columns, trace_answers, trace_changes, trace_details, trace_tables
from collect.findings.answer_section import AnswerSection
from collect.findings.columns import CellTables
from collect.findings.row import CellRow
from collect.metric import Metric, load_metrics
from collect.reading.load import LoadedMatrix
from collect.report import (
    choice_text,
    palette,
    provenance,
    report_start,
    study_tables,
    summary_tables,
    truncation,
    verdict_text,
)
from collect.summary import Summary
from shardlab import __version__
from shardlab.matrix import citation
from shardlab.terminal import notation, printable
from shardlab.terminal.table import Column, Table
from templates import render_page

TEMPLATE = "report/index.html.j2"
WIDE_FIGURES = (
    "telemetry", "gpus", "memory_timeline", "breakdown", "collectives", "operator_differences", "memory_categories", "sharding",
    "memory_of_categories", "head_to_head", "stragglers", "step_timeline", "run_timeline", "why_slower", "layers", "theory",
)  # fmt: skip  # figures that take a whole row of the page
FEW_CELLS = 4  # the runs of a figure with more cells are in a list that the reader opens
MAX_HEIGHT_RATIO = 1.4  # two figures share a row of the page only if the ratio of their heights is at most this


class Part(msgspec.Struct, frozen=True):
    """What the page says about one question. A reader opens a part; at first, only its title is visible."""

    title: str
    draw_figures: tuple[Callable[[figure.WorkloadGroup], figure.Figure | None], ...] = ()
    """What draws the figures of the part, in the order in which the page shows them."""
    table: str = ""
    """The name of the further table of cells (`columns.CellTables`) that is in the part."""
    sections: dict[str, str] = {}
    """(name, title) of the sections, each a file of templates/report. "" if the parts of the section have own titles."""


# The parts of the page below the table of cells, in the order of a reader's questions.
PARTS = {
    "choosing": Part("Which to choose", (head_to_head.draw,), sections={"choices": ""}),
    "speed": Part("Speed", (
        cell_rows.draw_throughput, step_parts.draw_stragglers,
        scaling.draw_scaling, scaling.draw_batch_sizes, scaling.draw_pull_interval,
        cell_rows.draw_step_time, training.draw_epoch_time, training.draw_epoch_histogram,
    ), "times", {"searches": "Searches for a batch size"}),
    "memory": Part("Memory", (
        memory_parts.draw_categories, memory_parts.draw_sharding, memory_parts.draw_theory,
        memory_over_time.draw_memory_timeline, memory_over_time.draw_categories_of_steps, memory_over_time.draw_profiled_memory,
        allocator.draw_active_blocks, allocator.draw_reserved_memory, allocator.draw_segment_blocks,
        cell_rows.draw_peak_memory, memory_over_time.draw_memory_by_run,
    ), "memory"),
    "time": Part("Where the time went", (
        step_parts.BREAKDOWN_FIGURE.draw, why_slower.draw, step_parts.OVERLAP_FIGURE.draw, step_parts.SLOW_RANKS_FIGURE.draw,
        step_parts.draw_collectives, rates.draw_bandwidth, step_parts.IDLE_FIGURE.draw, step_parts.PHASES_FIGURE.draw,
        operators.draw_layers, rates.draw_matrix_products, step_parts.ATTENTION_FIGURE.draw, operators.draw_differences,
        bubble.draw, timelines.draw_steps, timelines.draw_run, cell_rows.draw_utilization, telemetry.draw_hosts,
        telemetry.draw_gpus,
    ), "sent", {"traces": ""}),
    "learning": Part(
        "Losses and accuracy", (training.draw_loss, training.draw_accuracy), sections={"losses": "Are the losses the same?"}
    ),
    "study": Part("The study", sections={
        "reported": "Reported and measured numbers", "tables": "Tables of the study that are text",
        "deviations": "Deviations from the original matrix", "study": "What the study leaves open",
    }),
    "trust": Part("How sure the numbers are", sections={
        "failures": "What did not complete", "faults": summary_tables.FAULTS_TITLE, "instruments": "Cost of the instruments",
        "predictions": summary_tables.PREDICTIONS_TITLE, "records": "Quality of the records",
    }),
    "ran": Part("What ran where", sections={"runs": "Runs", "where": "Hosts and software"}),
    "terms": Part("Definitions", sections={"reading": "Definitions of the metrics", "cite": "How to cite"}),
}  # fmt: skip
# by the list of the summary
TRACE_ANSWERS = trace_changes.SECTIONS | trace_answers.SECTIONS | trace_details.SECTIONS | trace_tables.SECTIONS
MOST_FACET_VALUES = 24  # a key with more values gets no check boxes; the search field finds its values
LEAST_ROWS = 4  # a table with fewer rows gets no tools: the reader sees all of it at once


class Facet(msgspec.Struct, frozen=True):
    """A property of cells by which a table is filtered and grouped, such as the strategy."""

    heading: str
    """The name of the property in the page."""
    values: list[str]
    """The value of each row of the summary, as text; "" if it has none."""
    choices: list[str]
    """The different values, each with a check box, in the order of the rows (numbers: ascending)."""


class ShownPart(msgspec.Struct, frozen=True):
    """A part of the page that is not empty."""

    name: str
    title: str
    contents: str
    """What the part holds, in few words, such as `4 figures · Runs`."""
    figures: list[DrawnFigure]
    tables: list[Table[CellRow]]
    sections: dict[str, str]
    """As `Part.sections`, without sections that are empty."""


class DrawnFigure(msgspec.Struct, frozen=True):
    """A figure with its place on the page."""

    name: str
    """Unique in the report; allowed as a file name."""
    kind: str
    """The name of the figure in its module, such as "head_to_head"; the same for the figures of different workloads."""
    part: str
    """The name of the part of the page (`PARTS`) that shows the figure."""
    title: str
    caption: str
    height_px: int
    is_wide: bool
    """Whether the figure takes a whole row of the page."""
    cells: list[str]
    """The ids of the cells that the figure shows."""
    spec: dict[str, Any]
    """The data and the layout for plotly, and `picture`, the additional layout of the figure as a picture file."""


def draw_page(loaded: LoadedMatrix, summary: Summary, folder: Path, runs_dir: Path) -> str:
    """Render the page of a report.

    folder: where the report will be written. runs_dir: the folder of the runs. Links from the page to the runs are relative,
    so the two folders can be moved together."""
    short_summary = truncation.truncate_summary(summary)
    cell_tables = columns.make_cell_tables(summary.rows, short_summary.rows)
    label_by_cell = summary.labels_by_cell
    tensors = memory_parts.map_tensor_memory(loaded.cells)
    figures = draw_figures(loaded, summary)
    choices = report_start.list_best_choices(summary, tensors)
    headline = _find_headline_figure(figures, [choice.workload for choice in choices])
    index_by_cell = {row.id: index for index, row in enumerate(short_summary.rows)}
    runs_path = Path(os.path.relpath(runs_dir, folder)).as_posix()
    section_tables = summary_tables.make_section_tables(short_summary, label_by_cell)
    facets = make_facets(cell_tables.summary_table.columns, short_summary.rows)
    return render_page(
        TEMPLATE,
        printable.clean_text,
        summary=short_summary,
        trace_answers=make_trace_answers(short_summary, label_by_cell),
        faults_note=summary_tables.FAULTS_NOTE,
        section_tables=section_tables,
        whole=summary,
        version=__version__,
        created=notation.format_time(summary.created_s),
        parts=_list_parts(
            short_summary, section_tables, [plot for plot in figures if plot.name != (headline and headline.name)], cell_tables
        ),
        palette=palette,
        plain_text=columns.format_value,
        label_of=label_by_cell,
        link_to=lambda name: _find_link_address(name, index_by_cell, runs_path),
        few_cells=FEW_CELLS,
        place_of=index_by_cell,
        text=verdict_text,
        redrawn=study_tables.redraw_tables(verdict_text.make_reported_lines(summary, label_by_cell)),
        table=cell_tables,
        facets=facets,
        facets_by_row=[
            msgspec.json.encode([facet.values[index] for facet in facets]).decode() for index in index_by_cell.values()
        ],
        least_rows=LEAST_ROWS,
        runs_path=runs_path,
        state_class=columns.find_notable_state,
        place_of_runs={cell.id: provenance.find_cell_provenance(cell) for cell in loaded.cells if cell.id in index_by_cell},
        headline=headline,
        chosen=choices,
        tensors=tensors,
        answer=report_start,
        choices=choice_text,
        places=provenance.list_run_properties(loaded),
        hosts=provenance.describe_hosts(loaded),
        record_tables=provenance.make_record_tables(summary),
        citations=_list_citations(summary),
        metrics=(shown_metrics := _select_shown_metrics(summary)),
        defined={metric.name for metric in shown_metrics},
        compressed=_compress_scripts(figures),
    )


def _find_link_address(name: str, index_by_cell: Mapping[str, int], runs_path: str) -> str:
    """The address of the runs of a cell on the page, or of a file of a run; "" if the page shows no runs of the cell.

    name: the id of the cell, the id of the run followed by a slash and the name of a file or "", or an address on the page.
    """
    if name in index_by_cell:
        return f"#runs-{index_by_cell[name]}"
    return name if name.startswith("#") else f"{runs_path}/{name}" if "/" in name else ""


def _list_parts(
    summary: Summary, section_tables: dict[str, list[Table[Any]]], figures: Sequence[DrawnFigure], cell_tables: CellTables
) -> list[ShownPart]:
    """The parts of the page that are not empty. figures: all but the figure at the start of the page."""
    contents_by_section: dict[str, Sequence[Any]] = {
        **section_tables,
        "reported": summary.reported,
        "study": [*summary.assumed, *summary.notes],
        "choices": choice_text.select_shown_families(summary),
        "traces": [rows for name in TRACE_ANSWERS for rows in getattr(summary, name)],
    }
    shown_parts = []
    for name, part in PARTS.items():
        part_figures = [plot for plot in figures if plot.part == name]
        tables = [cell_table for cell_table in cell_tables.further_tables if cell_table.name == part.table]
        sections = {section: title for section, title in part.sections.items() if contents_by_section.get(section, [title])}
        titles = [f"{len(part_figures)} figure{'s' * (len(part_figures) > 1)}" * bool(part_figures)]
        titles += [*(cell_table.title for cell_table in tables), *sections.values()]
        if part_figures or tables or sections:
            shown_parts.append(ShownPart(name, part.title, " · ".join(filter(None, titles)), part_figures, tables, sections))
    return shown_parts


def make_trace_answers(summary: Summary, labels: Mapping[str, str]) -> list[tuple[str, AnswerSection, list[Table[Any]]]]:
    """The answers of traces that have rows: (name of their list in the summary, how the page shows them, their tables).

    labels: {id of a cell: its label}."""
    return [
        (name, answer_section, answer_section.make_tables(rows, labels))
        for name, answer_section in TRACE_ANSWERS.items()
        if (rows := getattr(summary, name))
    ]


def _select_shown_metrics(summary: Summary) -> list[Metric]:
    """The metrics that a cell of the summary has, or for which the study prints a number."""
    metric_names = {name for row in summary.rows for name in row.metrics} | {entry.metric for entry in summary.reported}
    return [metric for metric in load_metrics() if metric.name in metric_names]


def _list_citations(summary: Summary) -> list[tuple[str, str]]:
    """(what is cited, its BibTeX entry): shardlab, and the study if its citation is known."""
    entries = [("shardlab", citation.make_shardlab_bibtex())]
    return entries + ([("The study", citation.make_study_bibtex(summary.matrix, summary.citation))] if summary.citation else [])


def _find_headline_figure(drawn_figures: Sequence[DrawnFigure], workloads: Sequence[str]) -> DrawnFigure | None:
    """The figure at the start of a report: the figure `head_to_head` (speed against memory) if it exists, else throughput.

    workloads: the workloads for which the start of the report says what to choose. If each workload has such a figure, the
    figure of the first of these workloads is returned.
    """
    for kind in ("head_to_head", "throughput_per_s"):
        candidates = [plot for plot in drawn_figures if plot.kind == kind]
        if candidates:
            first = next((plot for plot in candidates if workloads and plot.title.endswith(f", {workloads[0]}")), candidates[0])
            return msgspec.structs.replace(first, is_wide=False)  # the page shows the choices beside this figure
    return None


def read_plotly_script() -> str:
    """The JavaScript of plotly, which the page contains once for all figures."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def compress(text: bytes) -> Markup:
    """Compress a text with gzip, as base64: the page decompresses it in the browser. Base64 cannot end a <script> element."""
    return Markup(base64.b64encode(gzip.compress(text, mtime=0)).decode())


def _compress_scripts(figures: Sequence[DrawnFigure]) -> dict[str, Markup]:
    """What the page needs to draw its figures: plotly, and the data of the figures by name."""
    specs = msgspec.json.encode({plot.name: plot.spec for plot in figures})
    return {"plotly": compress(read_plotly_script().encode()), "specs": compress(specs)} if figures else {}


def draw_figures(loaded: LoadedMatrix, summary: Summary) -> list[DrawnFigure]:
    """Draw every figure that has data: all figures of one workload in the order of the page, then all of the next workload."""
    short_summary = truncation.truncate_summary(summary)
    shown_ids = {row.id for row in short_summary.rows}
    shown_cells = [cell for cell in loaded.cells if cell.id in shown_ids]
    groups = figure.group_by_workload(LoadedMatrix(loaded.expansion, shown_cells), short_summary)
    drawn = []
    for group in groups:
        title_suffix = f", {group.workload}" if len(groups) > 1 else ""
        cells = len(group.marks)
        caption_suffix = f" Shown are the first {cells} of {cells + group.left_out:,} cells." if group.left_out else ""
        mark = " (rehearsal)" * summary.rehearsal
        for name, part in PARTS.items():
            plots = arrange_in_rows([plot for draw in part.draw_figures if (plot := draw(group)) is not None])
            drawn += [_build_drawn_figure(plot, name, title_suffix, caption_suffix, is_wide, mark) for plot, is_wide in plots]
    return drawn


def arrange_in_rows(plots: Sequence[figure.Figure]) -> list[tuple[figure.Figure, bool]]:
    """Arrange figures in rows of two with about the same height, so that no row has an empty area.

    Returns a list of (figure, whether the figure takes the whole row). The order of the figures is kept, with one exception: to
    fill a row, the next figure of a similar height moves up.
    """
    remaining_plots = list(plots)
    arranged_plots: list[tuple[figure.Figure, bool]] = []
    while remaining_plots:
        next_plot = remaining_plots.pop(0)
        candidates = [] if next_plot.name in WIDE_FIGURES else remaining_plots
        partner_plot = next((other for other in candidates if _fits_beside(next_plot, other)), None)
        if partner_plot is None:
            arranged_plots.append((next_plot, True))
        else:
            remaining_plots.remove(partner_plot)
            arranged_plots += [(next_plot, False), (partner_plot, False)]
    return arranged_plots


def _fits_beside(plot: figure.Figure, other: figure.Figure) -> bool:
    lower_px, higher_px = sorted((plot.height_px, other.height_px))
    return other.name not in WIDE_FIGURES and higher_px <= MAX_HEIGHT_RATIO * lower_px


def _build_drawn_figure(
    plot: figure.Figure, part: str, title_suffix: str, caption_suffix: str, is_wide: bool, title_mark: str
) -> DrawnFigure:
    title = plot.title + title_suffix
    name = re.sub(r"[^a-z0-9.-]+", "-", f"{plot.name}{title_suffix}".replace("_", "-").lower())
    spec = {"data": plot.data, "layout": plot.layout, "picture": figure.make_image_layout(plot, title + title_mark, is_wide)}
    spec = printable.map_texts(spec, printable.clean_to_one_line)
    return DrawnFigure(name, plot.name, part, title, plot.caption + caption_suffix, plot.height_px, is_wide, plot.cells, spec)


def make_facets(columns: Sequence[Column[CellRow]], rows: Sequence[CellRow]) -> list[Facet]:
    """The facets of the rows: each key that identifies the cells and has few values, and the states of the runs.

    columns, rows: those of the summary table. The columns before `state` are the keys that identify the cells.
    """
    facets = []
    for column in columns:
        if column.name == "state":
            row_states = [" and ".join(row.states) for row in rows]
            facets.append(Facet(column.heading, row_states, list(dict.fromkeys(row_states))))
            break
        row_values = [str(column.text(row)) for row in rows]
        choices = list(dict.fromkeys(filter(None, row_values)))
        facets.append(Facet(column.heading, row_values, sorted(choices, key=float) if column.is_number else choices))
    return [facet for facet in facets if 1 < len(facet.choices) <= MOST_FACET_VALUES]
