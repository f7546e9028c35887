"""Explains a number of the summary: its metric, the formula with its values, the repeats, their runs and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from collect.explain import read_files
from collect.explain.read_file import ReadFile
from collect.findings.comparability import find_baseline, group_families
from collect.findings.row import CellRow, RunRow
from collect.findings.statistics import Estimate
from collect.loading.loaded_run import LoadedRun
from collect.metric import Metric, Reads, compute_quantities, load_metrics
from collect.reading.load import LoadedMatrix
from collect.report import verdict_text
from collect.summary import Summary, explain_why_not_compared
from shardlab.errors import InputError, UnknownName

NO_WINDOW_REASON = "the run has no two timed steps, so it has no timed window"


class TimedWindow(msgspec.Struct, frozen=True):
    """The timed window of a run: the time in which telemetry counts."""

    first_s: float
    """End of the first timed step, in seconds since the epoch."""
    last_s: float
    """End of the last timed step, in seconds since the epoch."""


class ExplainedRun(msgspec.Struct, frozen=True):
    """A repeat of the explained row, or of the baseline row of a comparison, with its value and the files that were read."""

    run: str
    cell: str
    """Id of the row."""
    repeat: int
    """Number of the repeat, from 1."""
    attempt: int
    """Number of the attempt, from 1."""
    state: str
    """State of the run."""
    value: float | None
    """Value of the metric in this run; null: not known, and `why` has the reason."""
    unit: str
    """Unit of `value`."""
    kind: str
    """What was measured, if the metric can be measured in several ways; else ''."""
    why: str
    """Why the value is not known, or what the reader must know about it; else ''."""
    inputs: dict[str, float]
    """Sums over the steps from which the value was computed: steps, step_ms (ms), units (of data)."""
    window: TimedWindow | None
    """The time in which samples of telemetry count; null: the value is not from such samples."""
    files: list[ReadFile]
    """The files from which the value was computed."""


class ExplainedTerm(msgspec.Struct, frozen=True):
    """A value in the formula of a metric that compares two rows."""

    cell: str
    """Id of the row."""
    label: str
    """Name of the row in the tables."""
    metric: str
    """Name of the metric that is compared."""
    value: float | None
    """The mean over the repeats of the row; null: not known."""
    unit: str
    """Unit of `value`."""


class Explanation(msgspec.Struct, frozen=True):
    """The JSON document of `collect explain`."""

    schema: int
    matrix: str
    cell: str
    """Id of the row."""
    label: str
    """Name of the row in the tables."""
    metric: str
    """Name of the metric."""
    direction: str
    """Which values are better."""
    definition: str
    """What the metric is, and how it is computed."""
    source: str
    """`ships` if shardlab defines the metric; else the file of the workspace that defines it."""
    rehearsal: bool
    """Whether a run that the value depends on is a rehearsal, whose times say nothing about speed."""
    value: float | None
    """The value in the summary; null: not known, and `why` has the reason."""
    unit: str
    """Unit of `value`."""
    low: float | None
    """Lower end of the 95 % interval of the mean; null: not known."""
    high: float | None
    """Upper end of the 95 % interval of the mean; null: not known."""
    n: int
    """Number of completed repeats."""
    why: str
    """Why the value is not known; else ''."""
    formula: str
    """The computation of `value` with its numbers, such as the mean of the repeats; '' if not known."""
    terms: list[ExplainedTerm]
    """The two compared values if the metric compares two rows; else empty."""
    files_remark: str
    """The files from which the values may come, if the metric does not declare what it reads; else ''."""
    runs: list[ExplainedRun]
    """The latest attempt of each repeat of the row, and of the row that it is compared with."""


def find_row(summary: Summary, row_name: str) -> CellRow:
    """The row that `row_name` names: by its label in the tables, its id, the start of its id, or the id of one of its runs.

    Raises InputError, which lists the allowed names, if no row or more than one row has this name.
    """
    label_by_cell = summary.labels_by_cell
    for row in summary.rows:
        has_label = _simplify_label(row_name) == _simplify_label(label_by_cell[row.id])
        if has_label or row_name == row.id or row_name in (run.run_id for run in row.runs):
            return row
    matching_rows = [row for row in summary.rows if row_name and row.id.startswith(row_name)]
    if len(matching_rows) == 1:
        return matching_rows[0]
    names_text = "; ".join(f"{label_by_cell[row.id]} ({row.id})" for row in matching_rows or summary.rows)
    row_text = f"{row_name!r}, the start of {len(matching_rows)} rows" if matching_rows else repr(row_name)
    raise InputError(f"ROW: found {row_text}. Allowed: {names_text}.")


def _simplify_label(label: str) -> str:
    """A label as it can be typed: without upper case, and with the letter x for the multiplication sign."""
    return label.casefold().replace("×", "x")


def find_metric(metric_name: str) -> Metric:
    """The metric of this name. Raises UnknownName, which lists the allowed names, if rows have no such metric."""
    allowed_metrics = {
        metric.name: metric
        for metric in load_metrics()
        if metric.of_run_at is None and not (metric.of_cells and metric.argument)
    }
    if metric_name not in allowed_metrics:
        raise UnknownName("metric", metric_name, allowed_metrics)
    return allowed_metrics[metric_name]


def explain_value(
    loaded: LoadedMatrix, summary: Summary, row: CellRow, metric: Metric, file_by_metric: Mapping[str, str]
) -> Explanation:
    """Explain the value of a metric in a row. file_by_metric: the file of the workspace that defines a metric, by its name."""
    explained_rows, terms, unknown_reason = [row], [], ""
    run_metric = metric
    if metric.of_cells is not None:
        baseline_row, unknown_reason = _find_baseline_row(loaded, summary, row, metric)
        explained_rows += [baseline_row] if baseline_row is not None and baseline_row.id != row.id else []
        run_metric = next(candidate for candidate in load_metrics() if candidate.name == metric.compares)
        for other in [row, *([baseline_row] if baseline_row is not None else [])]:
            estimate_of_row = other.metrics.get(metric.compares)
            value_and_unit = (estimate_of_row.value, estimate_of_row.unit) if estimate_of_row else (None, run_metric.unit)
            terms.append(ExplainedTerm(other.id, summary.labels_by_cell[other.id], metric.compares, *value_and_unit))
    run_by_id = {run.run_id: run for cell in loaded.cells for run in cell.runs}
    runs = [_explain_run(other.id, run, run_by_id[run.run_id], run_metric) for other in explained_rows for run in other.runs]
    estimate = row.metrics.get(metric.name)
    if estimate is None:
        unknown_reason = unknown_reason or _explain_unknown(row, runs)
    return Explanation(
        schema=1,
        matrix=summary.matrix,
        cell=row.id,
        label=summary.labels_by_cell[row.id],
        metric=metric.name,
        direction=metric.direction,
        definition=metric.definition,
        source=file_by_metric.get(metric.name, "ships"),
        rehearsal=any(run_by_id[run.run].is_rehearsal for run in runs),
        value=estimate.value if estimate else None,
        unit=estimate.unit if estimate else metric.unit,
        low=estimate.low if estimate else None,
        high=estimate.high if estimate else None,
        n=row.n,
        why="" if estimate else unknown_reason,
        formula=_build_formula(metric, estimate, terms, [run for run in runs if run.cell == row.id]) if estimate else "",
        terms=terms,
        files_remark=read_files.describe_possible_files(run_metric.name) if run_metric.reads is None else "",
        runs=runs,
    )


def _find_baseline_row(loaded: LoadedMatrix, summary: Summary, row: CellRow, metric: Metric) -> tuple[CellRow | None, str]:
    """Find the baseline with which the summary compares a row. Returns (row of the baseline, why the two have no ratio)."""
    for cell_family in group_families(loaded.cells):
        for cell in cell_family:
            if cell.id == row.id and (baseline := find_baseline(cell, cell_family, summary.baseline)) is not None:
                baseline_row = next(candidate for candidate in summary.rows if candidate.id == baseline.id)
                reason = explain_why_not_compared(metric, row, baseline_row)
                return baseline_row, reason or "the definition of the metric does not apply to these two rows"
    return None, f"no completed row of the baseline strategy {summary.baseline} does the same work"


def _explain_unknown(row: CellRow, runs: Sequence[ExplainedRun]) -> str:
    """The reason why a row has no value of a metric that is computed for each run."""
    if not row.n:
        return f"no repeat completed ({row.state})"
    known_runs = [run for run in runs if run.value is not None]
    if known_runs:
        kinds_text = ", ".join(dict.fromkeys(f"{run.unit} {run.kind}".strip() for run in known_runs))
        return f"the repeats have values of different units or kinds ({kinds_text}), so there is no mean"
    return f"no completed repeat has a value: {'; '.join(dict.fromkeys(run.why for run in runs if run.state == 'completed'))}"


def _explain_run(cell_id: str, run_row: RunRow, run: LoadedRun, metric: Metric) -> ExplainedRun:
    quantity = compute_quantities(run).get(metric.name)
    input_sums: dict[str, float] = {}
    timed_window: TimedWindow | None = None
    files_read: list[ReadFile] = []
    reason = ""
    if not metric.applies_to(run):
        reason = ": ".join(reason_part for reason_part in (run_row.state, run_row.why) if reason_part)
    elif (reads := metric.reads) is None:
        reason = "" if quantity is not None else "the file of the workspace gave no value"
    else:
        fresh_run = LoadedRun.read(run.folder)
        fresh_run.verdict, fresh_run.trace_method = run.verdict, run.trace_method
        files_read = read_files.read_files(fresh_run, reads)
        if quantity is None:
            reason = _explain_missing_value(fresh_run, reads, files_read)
        elif metric.of_run is not None and metric.of_run(fresh_run) != quantity:
            reason = "the files of this run changed while the command read them; run the command again"
        input_sums = _sum_inputs(fresh_run, reads)
        if reads.samples == "window" and fresh_run.timed_window is not None:
            timed_window = TimedWindow(*fresh_run.timed_window)
    return ExplainedRun(
        run=run_row.run_id,
        cell=cell_id,
        repeat=run_row.repeat,
        attempt=run_row.attempt,
        state=run_row.state,
        value=quantity.value if quantity else None,
        unit=quantity.unit if quantity else metric.unit,
        kind=quantity.kind if quantity else "",
        why=reason,
        inputs=input_sums,
        window=timed_window,
        files=files_read,
    )


def _explain_missing_value(run: LoadedRun, reads: Reads, files_read: Sequence[ReadFile]) -> str:
    """The reason why a completed run has no value of a metric. reads: what the metric reads of the run."""
    if run.resumed and reads.samples:
        return "the run resumed from a checkpoint, so telemetry does not cover the whole run"
    if missing_patterns := read_files.list_missing_patterns(run, reads):
        return f"the run has no {' and no '.join(missing_patterns)}"
    if reads.samples == "window" and run.timed_window is None:
        return NO_WINDOW_REASON
    if reads.samples == "window" and run.clock_stepped:
        return "the clock of a host was set during the run"
    file_names = dict.fromkeys(read_file.file.rpartition("/")[2] for read_file in files_read)
    names = "; ".join(read_files.describe_absent_keys(run, reads) or file_names)
    return (
        f"its records do not have what the definition needs ({names})" if names else "the definition does not apply to the run"
    )


def _sum_inputs(run: LoadedRun, reads: Reads) -> dict[str, float]:
    """Sums over the steps that the metric reads: their number, the time of the slowest rank in ms, and the units of data."""
    if reads.steps not in ("timed", "undisturbed"):
        return {}
    world = run.undisturbed_steps if reads.steps == "undisturbed" else run.world_steps
    input_sums = {"steps": world.height, "step_ms": float(world["step_ms"].sum()), "units": float(world["units"].sum())}
    return input_sums if world.height else {}


def _build_formula(metric: Metric, estimate: Estimate, terms: Sequence[ExplainedTerm], runs: Sequence[ExplainedRun]) -> str:
    value_text = verdict_text.format_quantity(estimate.value, estimate.unit)
    if terms:
        term_texts = " and ".join(
            f"{verdict_text.format_quantity(term.value, term.unit)} ({term.label})" for term in terms if term.value is not None
        )
        return f"{metric.name} = {value_text}, from the means of {metric.compares}: {term_texts}"
    known_runs = [run for run in runs if run.value is not None]
    if len(known_runs) == 1:
        return f"{metric.name} = {value_text}, the value of the only repeat that has one"
    value_unit = estimate.unit if estimate.unit == "bytes" else ""  # other units are only written after the mean
    value_sum = " + ".join(verdict_text.format_quantity(run.value, value_unit) for run in known_runs if run.value is not None)
    mean_formula = f"{metric.name} = ({value_sum}) / {len(known_runs)} = {value_text}"
    if estimate.low is None or estimate.high is None:
        return mean_formula
    interval_text = verdict_text.format_interval(estimate.low, estimate.high, estimate.unit)
    return f"{mean_formula}; 95 % interval of the mean by Student's t: {interval_text}"
