"""`collect explain` and `collect metrics`: what a metric is, and where its value in a row comes from."""

from __future__ import annotations

from datetime import UTC, datetime

from collect.explain import explanation
from collect.explain.explanation import ExplainedRun, Explanation, TimedWindow
from collect.explain.read_file import EventPlace, ReadFile
from collect.findings import comparability
from collect.metric import load_metrics
from collect.reading import own_metrics
from collect.reading.load import load_matrix
from collect.report import verdict_text
from collect.summary import summarize
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.terminal import notation
from shardlab.terminal.console import Output
from shardlab.workspace import handles
from shardlab.workspace.workspace import Workspace

MAX_NAME_CHARS = 40  # the name of an event is cut to this many characters on the terminal; --json has the whole name


def show_explanation(
    workspace: Workspace, matrix_name: str | None, baseline: str | None, row_name: str, metric_name: str, output: Output
) -> int:
    """Print how a number of the summary was computed. Returns the exit code: 1 if a file of the workspace defines no metric.

    matrix_name, baseline: as for `collect summarize`; None: its defaults. row_name, metric_name: row and metric of the number.
    Raises InputError if there is no such row.
    """
    loaded = load_matrix(workspace, matrix_name)
    shipped_names = {metric.name for metric in load_metrics()}
    workspace_metrics = own_metrics.OwnMetrics()
    if metric_name not in shipped_names:
        workspace_metrics = own_metrics.compute_own_metrics(workspace, loaded.expansion.name)
        workspace_metrics.add_to_runs(loaded)
        for fault in workspace_metrics.faults:
            output.print_remark(fault, style="red")
    metric = explanation.find_metric(metric_name)
    summary = summarize(loaded, comparability.choose_baseline_strategy(baseline, loaded))
    row = explanation.find_row(summary, handles.find_cell_id(row_name, workspace.number_cells(matrix_name)))
    document = explanation.explain_value(
        loaded, summary, row, metric, {own_metric.name: own_metric.file for own_metric in workspace_metrics.metrics}
    )
    _print_explanation(output, document)
    output.print_document(document)
    return int(bool(workspace_metrics.faults))


def _print_explanation(output: Output, document: Explanation) -> None:
    is_on_terminal = output.results.is_terminal and not output.json
    value_text = "not known" if document.value is None else verdict_text.format_quantity(document.value, document.unit)
    output.print_line(f"{document.label}: {document.metric} = {value_text}", style="bold" if is_on_terminal else None)
    if document.rehearsal:
        output.print_line(REHEARSAL_NOTE, style="yellow")
    if document.why:
        output.print_line(f"not known because: {document.why}", style="yellow")
    output.print_line(f"definition: {document.definition} ({document.direction}; {document.source})")
    if document.formula:
        output.print_line(f"formula: {document.formula}")
    headings = ["Cell", "Run", "Repeat", "State", "Value", "From", "File of the run", "Lines, keys or events"]
    rows = []
    for run in document.runs:
        run_columns = [run.cell, run.run, str(run.repeat), run.state, _format_run_value(run), _format_inputs(run)]
        file_rows = [line for file in run.files for line in _make_file_rows(file, run.run)] or [["", ""]]
        rows += [[*(run_columns if not number else [""] * len(run_columns)), *file] for number, file in enumerate(file_rows)]
    one_cell = len({run.cell for run in document.runs}) == 1  # then the table has no column Cell: the line above names the cell
    indexes = [index for index in range(one_cell, len(headings)) if any(row[index] for row in rows)]
    shown_rows = [[row[index] for index in indexes] for row in rows]
    output.print_table("", [headings[index] for index in indexes], shown_rows, priorities={"Run": 3, "State": 2, "From": 1})
    if document.files_remark:
        output.print_line(document.files_remark)
    for run in document.runs:
        if run.window is not None:
            output.print_line(f"{run.run}: samples count {_format_window(run.window)}")
        if run.why and run.why not in document.why:
            output.print_line(f"{run.run}: {run.why}", style="yellow")


def _make_file_rows(file: ReadFile, run_id: str) -> list[list[str]]:
    """The rows of a file in the table: its path in the folder of the run, and for each place in it what is there."""
    events = [f"{part.count:,} {part.kind}: {_format_event(part.first)} ... {_format_event(part.last)}" for part in file.events]
    place_texts = events or [file.lines or ", ".join(file.keys)]
    short_path = file.file.removeprefix(f"runs/{run_id}/")
    return [[short_path if not place_number else "", place_text] for place_number, place_text in enumerate(place_texts)]


def _format_event(event_place: EventPlace) -> str:
    shown_name = event_place.name if len(event_place.name) <= MAX_NAME_CHARS else f"{event_place.name[: MAX_NAME_CHARS - 3]}..."
    return f"{shown_name} at ts {event_place.start_ns // 1000}.{event_place.start_ns % 1000:03d}"


def _format_window(timed_window: TimedWindow) -> str:
    start_time, end_time = (datetime.fromtimestamp(wall_s, UTC) for wall_s in (timed_window.first_s, timed_window.last_s))
    return f"from {start_time:%Y-%m-%d %H:%M:%S.%f} to {end_time:%H:%M:%S.%f} UTC, the timed window"


def _format_run_value(run: ExplainedRun) -> str:
    if run.value is None:
        return "not known"
    return " ".join(value_part for value_part in (verdict_text.format_quantity(run.value, run.unit), run.kind) if value_part)


def _format_inputs(explained_run: ExplainedRun) -> str:
    """The inputs of a value in words, such as `10 steps, 1,020 ms, 5,120 units`."""
    if not explained_run.inputs:
        return ""
    step_count, step_ms, unit_count = (explained_run.inputs[input_name] for input_name in ("steps", "step_ms", "units"))
    return f"{step_count:,.0f} steps, {notation.format_number(step_ms)} ms, {notation.format_number(unit_count)} units"


def print_metrics(workspace: Workspace, output: Output) -> int:
    """Print all metrics, also those of the workspace. Returns the exit code: 1 if a file of the workspace defines no metric."""
    workspace_metrics = own_metrics.compute_own_metrics(workspace, None)
    workspace_metrics.add_to_menu()
    metrics = load_metrics()
    files = {entry.name: entry.file for entry in workspace_metrics.metrics}
    rows = [[entry.name, entry.unit, entry.direction, entry.definition, files.get(entry.name, "ships")] for entry in metrics]
    output.print_table("", ["Metric", "Unit", "Direction", "Definition", "From"], rows, priorities={"Direction": 1})
    for fault in workspace_metrics.faults:
        output.print_remark(fault, style="red")
    keys = ("name", "unit", "direction", "definition")
    output.print_document([{key: getattr(entry, key) for key in keys} | {"file": files.get(entry.name)} for entry in metrics])
    return int(bool(workspace_metrics.faults))
