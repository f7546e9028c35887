"""Builds the content of the live page: a table of the queue of runs, and the data of the figures of running runs.

The script of the page requests this content again and again.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect import figure
from collect.drawing import axes
from collect.report import palette
from collect.watch.curve import LiveCurve
from collect.watch.queue import Queue, QueuedRun, count_states, estimate_remaining_s
from collect.watch.run_series import STEP_FIGURES, TIME_FIGURES
from shardlab import __version__
from shardlab.errors import ShardlabError
from shardlab.runs import recorder_ends
from shardlab.runs.rundir import was_rehearsal
from shardlab.runs.state import FINAL_STATES, JudgedState
from shardlab.terminal import moments, printable
from shardlab.workspace import handles, inventory
from shardlab.workspace.workspace import Workspace
from templates import render_page

MIN_READING_INTERVAL_S = 1.0  # the least time in seconds between two readings of the record files, however many pages are open
MOST_DRAWN_RUNS = 4  # the most runs whose figures are drawn
MOST_QUEUE_ROWS = 200  # the most rows of the queue that are shown
FIGURE_HEIGHT_PX = 220  # the height of a figure
SERIES_COLOURS = tuple(f"var(--{name})" for name in palette.LIGHT if name.startswith("series-"))


class QueueRow(msgspec.Struct, frozen=True):
    """A run as a row of the queue, as text."""

    run_id: str
    handle: str
    """The short name of the run, such as c3.2; "" if the last matrix does not have the run."""
    state: str
    step: str
    """Such as "40 of 100"."""
    share_pct: float | None
    """How much of the run is done, from 0 to 100; None if this is not known."""
    rate: str
    """The throughput with its unit."""
    left: str
    """The remaining time."""
    why: str
    """Whether the run is a rehearsal, the reason for the state, and whether a sampler or the tracker ended early."""


class RunAtWork(msgspec.Struct, frozen=True):
    """A run whose figures the page draws."""

    run_id: str
    row: QueueRow
    hosts: list[str]
    last_record_s: float
    """The time of the last record, in seconds since the epoch."""
    figures: list[dict[str, Any]]
    """For each figure the title, a note, and the data and layout for plotly."""


class LivePage:
    """The live page and its data. If several pages are open, a lock lets only one thread at a time read the record files."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._queue = workspace, Queue(workspace)
        self._lock = threading.Lock()
        self._last_reading_s = float("-inf")
        self._document, self._document_tag = b"", ""

    def render_html(self) -> bytes:
        """The HTML of the page without data. The script in the page requests the data."""
        page_text = render_page(
            "watch/index.html.j2",
            printable.clean_text,
            title=self._name_matrix(),
            workspace=str(self._workspace.path),
            version=__version__,
            palette=palette,
        )
        return page_text.encode()

    def _name_matrix(self) -> str:
        """The name of the last matrix; the name of the workspace's folder if no matrix was submitted here."""
        with contextlib.suppress(ShardlabError):
            return self._workspace.read_expansion(None).name
        return self._workspace.path.name or str(self._workspace.path)

    def refresh_document(self) -> tuple[bytes, str]:
        """Returns (the present data of the page as JSON, a tag that changes if and only if this JSON changes)."""
        with self._lock:
            if time.monotonic() - self._last_reading_s >= MIN_READING_INTERVAL_S:
                self._document = printable.encode_printable_json(self._build_data())
                self._document_tag = f'"{hashlib.sha256(self._document).hexdigest()[:32]}"'
                self._last_reading_s = time.monotonic()
            return self._document, self._document_tag

    def _build_data(self) -> dict[str, Any]:
        try:
            runs = self._queue.refresh()
        except ShardlabError as error:
            return {"problem": str(error), "queue": "", "runs": []}
        followed_runs = self._queue.follow_running_runs(runs)
        lease = inventory.read_lease(self._workspace)
        units = {run.run.cell.workload: run.result.unit for run in runs if run.run is not None and run.result is not None}
        cell_handles = self._workspace.number_cells()
        row_by_run = {run.run_id: _build_row(run, run.judge_under_lease(lease), units, cell_handles) for run in runs}
        remaining_s = estimate_remaining_s(runs)
        overview_html = render_page(
            "watch/overview.html.j2",
            printable.clean_text,
            counts=count_states([row.state for row in row_by_run.values()]),
            total=len(runs),
            ended=sum(run.verdict.state in FINAL_STATES for run in runs),
            failed=sum(run.has_failed for run in runs),
            left=moments.format_duration(remaining_s) if remaining_s is not None else "",
        )
        drawn_runs = [_build_run_at_work(run, row_by_run[run.run_id]) for run in followed_runs[:MOST_DRAWN_RUNS]]
        queue_html = render_page(
            "watch/queue.html.j2",
            printable.clean_text,
            rows=list(row_by_run.values())[:MOST_QUEUE_ROWS],
            left_out=max(len(row_by_run) - MOST_QUEUE_ROWS, 0),
            total=len(row_by_run),
            runs_path=str(self._workspace.runs),
        )
        head_by_run = {
            run.run_id: render_page("watch/run.html.j2", printable.clean_text, run=run, figures=run.figures)
            for run in drawn_runs
        }
        return {
            "problem": "",
            "overview": overview_html,
            "queue": queue_html,
            "not_drawn": max(len(followed_runs) - MOST_DRAWN_RUNS, 0),
            "running": bool(followed_runs) and followed_runs[0].verdict.state == "running",
            "runs": [
                {"id": run.run_id, "head": head_by_run[run.run_id], "last_record_s": run.last_record_s, "figures": run.figures}
                for run in drawn_runs
            ],
        }


def _build_row(run: QueuedRun, verdict: JudgedState, units: Mapping[str, str], handle_by_cell: Mapping[str, str]) -> QueueRow:
    """units: the unit of the throughput by workload, as the runs that ended say it."""
    step, steps = run.last_step, run.step_count
    progress = run.series.progress if run.series is not None and verdict.state == "running" else None
    cell = run.run.cell if run.run is not None else None
    rate = progress.compute_rate_per_s(cell) if progress is not None and cell is not None else None
    remaining_s = progress.estimate_left_s(cell) if progress is not None and cell is not None else None
    if run.result is not None:
        rate = run.result.throughput_per_s
    is_rehearsal = run.run is not None and was_rehearsal(run.run, run.result, run.events)
    reason = ("held: " if verdict.held else "") + verdict.why
    return QueueRow(
        run_id=run.run_id,
        handle=handles.make_handle(run.run_id, handle_by_cell),
        state=verdict.state,
        step=f"{step:,} of {steps:,}" if step is not None and steps is not None else f"{step:,}" if step is not None else "",
        share_pct=min(100 * step / steps, 100.0) if step is not None and steps else None,
        rate=f"{rate:,.0f} {units.get(cell.workload, 'units') if cell is not None else 'units'}/s" if rate is not None else "",
        left=moments.format_duration(max(remaining_s, 0.0)) if remaining_s is not None else "",
        why="; ".join(filter(None, ("rehearsal" * is_rehearsal, reason, *recorder_ends.describe_early_ends(run.events)))),
    )


def _build_run_at_work(run: QueuedRun, row: QueueRow) -> RunAtWork:
    assert run.series is not None
    figures_or_none = [
        _build_live_figure(title, run.series.curves[title], run.series.left_out.get(title, ()))
        for title in (*STEP_FIGURES, *TIME_FIGURES)
    ]
    return RunAtWork(
        run_id=run.run_id,
        row=row,
        hosts=run.folder.list_hosts(),
        last_record_s=max(run.series.last_record_s, run.last_event_s),
        figures=[live_figure for live_figure in figures_or_none if live_figure is not None],
    )


def _build_live_figure(title: str, lines: Mapping[str, LiveCurve], left_out: Sequence[str] | set[str]) -> dict[str, Any] | None:
    """A figure for plotly, with one line for each curve; None if there are no curves. left_out: names of lines that are not
    drawn."""
    if not lines:
        return None
    is_over_steps = title in STEP_FIGURES
    plotly_lines = []
    for line_index, (line_name, curve) in enumerate(sorted(lines.items())):
        line_x, line_y = curve.get_points() if is_over_steps else curve.get_points_with_gaps()
        plotly_lines.append(
            {
                "type": "scatter",
                "mode": "lines" if len(line_x) > figure.MAX_MARKED else "lines+markers",
                "name": html.escape(printable.clean_to_one_line(line_name), quote=False),
                "x": [round(x_value, 3) for x_value in line_x],
                "y": [None if y_value is None else float(f"{y_value:.6g}") for y_value in line_y],
                "line": {
                    "color": SERIES_COLOURS[line_index % len(SERIES_COLOURS)],
                    "width": 1.5,
                    "dash": ("solid", "dot")[line_index // len(SERIES_COLOURS) % 2],
                },
                "marker": {"size": 4},
                "connectgaps": False,
                "hovertemplate": "%{y:.4~g}" + (" at step %{x}" if is_over_steps else " at %{x:.0f} s"),
            }
        )
    has_legend = len(plotly_lines) > 1
    x_axis = axes.make_axis(
        "step" if is_over_steps else "seconds since the start", rangemode="tozero" if not is_over_steps else "normal"
    )
    y_range = {"range": [0, 100]} if "(%)" in title else {"rangemode": "normal" if is_over_steps else "tozero"}
    y_axis = axes.make_axis("", nticks=5, exponentformat="none", **y_range)
    height_px = FIGURE_HEIGHT_PX + (20 * -(-len(plotly_lines) // 3) if has_legend else 0)
    left_out_note = f"{len(left_out)} more lines are not drawn." if left_out else ""
    layout = axes.make_layout(x_axis, y_axis, showlegend=has_legend, height=height_px)
    return {"title": title, "note": left_out_note, "data": plotly_lines, "layout": layout}
