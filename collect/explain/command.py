"""`collect explain` and `collect metrics`: what a metric is, and where its value in a row comes from."""

from __future__ import annotations

from datetime import UTC, datetime

from collect import notation
from collect.explain import explanation
from collect.explain.explanation import ExplainedRun, Explanation, UsedWindow
from collect.explain.read_file import EventPlace, ReadFile
from collect.findings import comparability
from collect.metric import menu
from collect.reading import own_metrics
from collect.reading.load import load
from collect.report import verdict_text
from collect.summary import summarize
from shardlab.runs.run import REHEARSAL
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

LONGEST_NAME = 40  # the name of an event is cut to this many characters on the terminal; --json has the whole name


def show(
    workspace: Workspace, matrix: str | None, baseline: str | None, row_name: str, metric_name: str, output: Output
) -> int:
    """Print how a number of the summary was computed. Returns the exit code: 1 if a file of the workspace defines no metric.

    matrix, baseline: as for `collect summarize`; None: its defaults. row_name, metric_name: row and metric of the number.
    Raises InputError if there is no such row.
    """
    loaded = load(workspace, matrix)
    shipped = {metric.name for metric in menu()}
    own = own_metrics.OwnMetrics()
    if metric_name not in shipped:
        own = own_metrics.of(workspace, loaded.expansion.name)
        own.add_to(loaded)
        for fault in own.faults:
            output.remark(fault, style="red")
    metric = explanation.find_metric(metric_name)
    summary = summarize(loaded, comparability.baseline_strategy(baseline, loaded))
    row = explanation.find_row(summary, row_name)
    document = explanation.explain(loaded, summary, row, metric, {one.name: one.file for one in own.metrics})
    _show(output, document)
    output.document(document)
    return int(bool(own.faults))


def _show(output: Output, document: Explanation) -> None:
    on_terminal = output.results.is_terminal and not output.json
    value = "not known" if document.value is None else verdict_text.quantity(document.value, document.unit)
    output.line(f"{document.label}: {document.metric} = {value}", style="bold" if on_terminal else None)
    if document.rehearsal:
        output.line(REHEARSAL, style="yellow")
    if document.why:
        output.line(f"not known because: {document.why}", style="yellow")
    output.line(f"definition: {document.definition} ({document.direction}; {document.source})")
    if document.formula:
        output.line(f"formula: {document.formula}")
    heads = ["Cell", "Run", "Repeat", "State", "Value", "From", "File of the run", "Lines, keys or events"]
    rows = []
    for run in document.runs:
        first = [run.cell, run.run, str(run.repeat), run.state, _value(run), _inputs(run)]
        read = [line for file in run.files for line in _places(file, run.run)] or [["", ""]]
        rows += [[*(first if not number else [""] * len(first)), *file] for number, file in enumerate(read)]
    one_cell = len({run.cell for run in document.runs}) == 1  # then the table has no column Cell: the line above names the cell
    shown = [place for place in range(one_cell, len(heads)) if any(row[place] for row in rows)]
    output.table("", [heads[place] for place in shown], [[row[place] for place in shown] for row in rows])
    for run in document.runs:
        if run.window is not None:
            output.line(f"{run.run}: samples count {_moments(run.window)}")
        if run.why and run.why not in document.why:
            output.line(f"{run.run}: {run.why}", style="yellow")


def _places(file: ReadFile, run: str) -> list[list[str]]:
    """The rows of a file in the table: its path in the folder of the run, and for each place in it what is there."""
    events = [f"{group.count:,} {group.kind}: {_event(group.first)} ... {_event(group.last)}" for group in file.events]
    places = events or [file.lines or ", ".join(file.keys)]
    short = file.file.removeprefix(f"runs/{run}/")
    return [[short if not number else "", place] for number, place in enumerate(places)]


def _event(place: EventPlace) -> str:
    name = place.name if len(place.name) <= LONGEST_NAME else f"{place.name[: LONGEST_NAME - 3]}..."
    return f"{name} at ts {place.start_ns // 1000}.{place.start_ns % 1000:03d}"


def _moments(window: UsedWindow) -> str:
    first, last = (datetime.fromtimestamp(at, UTC) for at in (window.first_s, window.last_s))
    return f"from {first:%Y-%m-%d %H:%M:%S.%f} to {last:%H:%M:%S.%f} UTC, the timed window"


def _value(run: ExplainedRun) -> str:
    if run.value is None:
        return "not known"
    return " ".join(part for part in (verdict_text.quantity(run.value, run.unit), run.kind) if part)


def _inputs(run: ExplainedRun) -> str:
    """The inputs of a value in words, such as `10 steps, 1,020 ms, 5,120 units`."""
    if not run.inputs:
        return ""
    steps, step_ms, units = (run.inputs[name] for name in ("steps", "step_ms", "units"))
    return f"{steps:,.0f} steps, {notation.number(step_ms)} ms, {notation.number(units)} units"


def list_metrics(workspace: Workspace, output: Output) -> int:
    """Print all metrics, also those of the workspace. Returns the exit code: 1 if a file of the workspace defines no metric."""
    own = own_metrics.of(workspace, None)
    own.on_menu()
    metrics = menu()
    files = {metric.name: metric.file for metric in own.metrics}
    rows = [[one.name, one.unit, one.direction, one.definition, files.get(one.name, "ships")] for one in metrics]
    output.table("", ["Metric", "Unit", "Direction", "Definition", "From"], rows)
    for fault in own.faults:
        output.remark(fault, style="red")
    keys = ("name", "unit", "direction", "definition")
    output.document([{key: getattr(metric, key) for key in keys} | {"file": files.get(metric.name)} for metric in metrics])
    return int(bool(own.faults))
