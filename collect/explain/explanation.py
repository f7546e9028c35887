"""Explains a number of the summary: its metric, the formula with its values, the repeats, their runs and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from collect.explain import noted_run, read_files
from collect.explain.noted_run import NotedRun, Notes
from collect.explain.read_file import ReadFile
from collect.findings.comparability import baseline_of, families
from collect.findings.row import CellRow, RunRow
from collect.findings.statistics import Estimate
from collect.loading.loaded_run import LoadedRun
from collect.metric import Metric, menu, quantities
from collect.reading.load import Loaded
from collect.report import verdict_text
from collect.summary import Summary, why_not_compared
from shardlab.errors import InputError, UnknownName

FEWEST = "the run has no two timed steps, so it has no timed window"


class UsedWindow(msgspec.Struct, frozen=True):
    """The timed window of a run: the time in which telemetry counts."""

    first_s: float  # end of the first timed step, in seconds since the epoch
    last_s: float  # end of the last timed step, in seconds since the epoch


class ExplainedRun(msgspec.Struct, frozen=True):
    """A repeat of the explained row, or of the baseline row of a comparison, with its value and the files that were read."""

    run: str
    cell: str  # id of the row
    repeat: int  # number of the repeat, from 1
    attempt: int  # number of the attempt, from 1
    state: str  # state of the run
    value: float | None  # value of the metric in this run; null: not known, and `why` has the reason
    unit: str  # unit of `value`
    kind: str  # what was measured, if the metric can be measured in several ways; else ''
    why: str  # why the value is not known, or what the reader must know about it; else ''
    inputs: dict[str, float]  # sums over the steps from which the value was computed: steps, step_ms (ms), units (of data)
    window: UsedWindow | None  # the time in which samples of telemetry count; null: the value is not from such samples
    files: list[ReadFile]  # the files from which the value was computed


class ExplainedTerm(msgspec.Struct, frozen=True):
    """A value in the formula of a metric that compares two rows."""

    cell: str  # id of the row
    label: str  # name of the row in the tables
    metric: str  # name of the metric that is compared
    value: float | None  # the mean over the repeats of the row; null: not known
    unit: str  # unit of `value`


class Explanation(msgspec.Struct, frozen=True):
    """The JSON document of `collect explain`."""

    schema: int
    matrix: str
    cell: str  # id of the row
    label: str  # name of the row in the tables
    metric: str  # name of the metric
    direction: str  # which values are better
    definition: str  # what the metric is, and how it is computed
    source: str  # `ships` if shardlab defines the metric; else the file of the workspace that defines it
    rehearsal: bool  # whether the matrix has rehearsals, whose times say nothing about speed
    value: float | None  # the value in the summary; null: not known, and `why` has the reason
    unit: str  # unit of `value`
    low: float | None  # lower end of the 95 % interval of the mean; null: not known
    high: float | None  # upper end of the 95 % interval of the mean; null: not known
    n: int  # number of completed repeats
    why: str  # why the value is not known; else ''
    formula: str  # the computation of `value` with its numbers, such as the mean of the repeats; '' if not known
    terms: list[ExplainedTerm]  # the two compared values if the metric compares two rows; else empty
    runs: list[ExplainedRun]  # the latest attempt of each repeat of the row, and of the row that it is compared with


def find_row(summary: Summary, asked: str) -> CellRow:
    """The row that `asked` names: by its label in the tables, its id, the start of its id, or the id of one of its runs.

    Raises InputError, which lists the allowed names, if no row or more than one row has this name.
    """
    label_of = summary.label_of
    for row in summary.rows:
        if asked == row.id or _plain(asked) == _plain(label_of[row.id]) or asked in (run.run_id for run in row.runs):
            return row
    fitting = [row for row in summary.rows if asked and row.id.startswith(asked)]
    if len(fitting) == 1:
        return fitting[0]
    names = "; ".join(f"{label_of[row.id]} ({row.id})" for row in fitting or summary.rows)
    found = f"{asked!r}, the start of {len(fitting)} rows" if fitting else repr(asked)
    raise InputError(f"ROW: found {found}. Allowed: {names}.")


def _plain(label: str) -> str:
    """A label as it can be typed: without upper case, and with the letter x for the multiplication sign."""
    return label.casefold().replace("×", "x")


def find_metric(name: str) -> Metric:
    """The metric of this name. Raises UnknownName, which lists the allowed names, if rows have no such metric."""
    allowed = {
        metric.name: metric for metric in menu() if metric.of_run_at is None and not (metric.of_cells and metric.argument)
    }
    if name not in allowed:
        raise UnknownName("metric", name, allowed)
    return allowed[name]


def explain(loaded: Loaded, summary: Summary, row: CellRow, metric: Metric, own: Mapping[str, str]) -> Explanation:
    """Explain the value of a metric in a row. own: file of the workspace that defines a metric, by the metric's name."""
    rows, terms, why = [row], [], ""
    of_runs = metric
    if metric.of_cells is not None:
        against, why = _against(loaded, summary, row, metric)
        rows += [against] if against is not None and against.id != row.id else []
        of_runs = next(known for known in menu() if known.name == metric.compares)
        for each in [row, *([against] if against is not None else [])]:
            found = each.metrics.get(metric.compares)
            known = (found.value, found.unit) if found else (None, of_runs.unit)
            terms.append(ExplainedTerm(each.id, summary.label_of[each.id], metric.compares, *known))
    by_id = {run.run_id: run for cell in loaded.cells for run in cell.runs}
    runs = [_run(each.id, run, by_id[run.run_id], of_runs) for each in rows for run in each.runs]
    estimate = row.metrics.get(metric.name)
    if estimate is None:
        why = why or _why_unknown(row, runs)
    return Explanation(
        schema=1,
        matrix=summary.matrix,
        cell=row.id,
        label=summary.label_of[row.id],
        metric=metric.name,
        direction=metric.direction,
        definition=metric.definition,
        source=own.get(metric.name, "ships"),
        rehearsal=summary.rehearsal,
        value=estimate.value if estimate else None,
        unit=estimate.unit if estimate else metric.unit,
        low=estimate.low if estimate else None,
        high=estimate.high if estimate else None,
        n=row.n,
        why="" if estimate else why,
        formula=_formula(metric, estimate, terms, [run for run in runs if run.cell == row.id]) if estimate else "",
        terms=terms,
        runs=runs,
    )


def _against(loaded: Loaded, summary: Summary, row: CellRow, metric: Metric) -> tuple[CellRow | None, str]:
    """Find the baseline with which the summary compares a row. Returns (row of the baseline, why the two have no ratio)."""
    for family in families(loaded.cells):
        for cell in family:
            if cell.id == row.id and (baseline := baseline_of(cell, family, summary.baseline)) is not None:
                against = next(each for each in summary.rows if each.id == baseline.id)
                why = why_not_compared(metric, row, against)
                return against, why or "the definition of the metric does not apply to these two rows"
    return None, f"no completed row of the baseline strategy {summary.baseline} does the same work"


def _why_unknown(row: CellRow, runs: Sequence[ExplainedRun]) -> str:
    """The reason why a row has no value of a metric that is computed for each run."""
    if not row.n:
        return f"no repeat completed ({row.state})"
    known = [run for run in runs if run.value is not None]
    if known:
        kinds = ", ".join(dict.fromkeys(f"{run.unit} {run.kind}".strip() for run in known))
        return f"the repeats have values of different units or kinds ({kinds}), so there is no mean"
    return f"no completed repeat has a value: {'; '.join(dict.fromkeys(run.why for run in runs if run.state == 'completed'))}"


def _run(cell_id: str, shown: RunRow, run: LoadedRun, metric: Metric) -> ExplainedRun:
    quantity = quantities(run).get(metric.name) if run.completed else None
    inputs: dict[str, float] = {}
    window: UsedWindow | None = None
    found: list[ReadFile] = []
    why = ""
    if not run.completed:
        why = ": ".join(part for part in (shown.state, shown.why) if part)
    elif metric.of_run is None:
        why = "" if quantity is not None else "the file of the workspace gave no value"
    else:
        again, noted, notes = noted_run.of_run(metric.of_run, run)
        found = read_files.read_files(noted, notes)
        if quantity is None:
            why = _why_none(noted, notes, found)
        elif again is None or again != quantity:
            why = "the files of this run changed while the command read them; run the command again"
        inputs = _inputs(noted, notes)
        if {"sample_records", "window"} <= notes.every and noted.window is not None:
            window = UsedWindow(*noted.window)
    return ExplainedRun(
        run=shown.run_id,
        cell=cell_id,
        repeat=shown.repeat,
        attempt=shown.attempt,
        state=shown.state,
        value=quantity.value if quantity else None,
        unit=quantity.unit if quantity else metric.unit,
        kind=quantity.kind if quantity else "",
        why=why,
        inputs=inputs,
        window=window,
        files=found,
    )


def _why_none(run: NotedRun, notes: Notes, found: Sequence[ReadFile]) -> str:
    """The reason why a completed run has no value of a metric. notes: which attributes of the run the metric read."""
    if run.resumed and "whole_samples" in notes.every:
        return "the run resumed from a checkpoint, so telemetry does not cover the whole run"
    if absent := read_files.missing(run, notes):
        return f"the run has no {' and no '.join(absent)}"
    if "window" in notes.every and run.window is None:
        return FEWEST
    if "clock_stepped" in notes.every and run.clock_stepped:
        return "the clock of a host was set during the run"
    lacks = read_files.absent_keys(run, notes) or list(dict.fromkeys(file.file.rpartition("/")[2] for file in found))
    names = "; ".join(lacks)
    return (
        f"its records do not have what the definition needs ({names})" if names else "the definition does not apply to the run"
    )


def _inputs(run: NotedRun, notes: Notes) -> dict[str, float]:
    """Sums over the steps that the metric read: their number, the time of the slowest rank in ms, and the units of data."""
    name = next((name for name in ("undisturbed", "world", "timed") if name in notes.direct), None)
    if name is None:
        return {}
    world = run.undisturbed if name == "undisturbed" else run.world
    sums = {"steps": world.height, "step_ms": float(world["step_ms"].sum()), "units": float(world["units"].sum())}
    return sums if world.height else {}


def _formula(metric: Metric, estimate: Estimate, terms: Sequence[ExplainedTerm], runs: Sequence[ExplainedRun]) -> str:
    value = verdict_text.quantity(estimate.value, estimate.unit)
    if terms:
        told = " and ".join(
            f"{verdict_text.quantity(one.value, one.unit)} ({one.label})" for one in terms if one.value is not None
        )
        return f"{metric.name} = {value}, from the means of {metric.compares}: {told}"
    known = [run for run in runs if run.value is not None]
    if len(known) == 1:
        return f"{metric.name} = {value}, the value of the only completed repeat"
    each = estimate.unit if estimate.unit == "bytes" else ""  # other units are only written after the mean
    values = " + ".join(verdict_text.quantity(run.value, each) for run in known if run.value is not None)
    mean = f"{metric.name} = ({values}) / {len(known)} = {value}"
    if estimate.low is None or estimate.high is None:
        return mean
    spread = verdict_text.interval(estimate.low, estimate.high, estimate.unit)
    return f"{mean}; 95 % interval of the mean by Student's t: {spread}"
