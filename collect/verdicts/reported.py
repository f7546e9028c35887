"""Compares each number that a study prints with the number that was measured here for the same metric and cell."""

from __future__ import annotations

from typing import Any

import msgspec

from collect.metrics.memory import KIND_BY_MEMORY_COLUMN
from collect.reading.load import LoadedMatrix
from collect.verdicts import reasons
from collect.verdicts.printed_number import ParsedNumber, parse_number
from collect.verdicts.selection import STATE_METRIC, Measurements, NoMeasurement
from collect.verdicts.uncertain_number import UncertainNumber
from shardlab.matrix.study import Reported

# kinds of numbers measured on a CPU; a study on GPUs measures them in another way
_KINDS_OF_CPU = {KIND_BY_MEMORY_COLUMN["rss_bytes"], "cpu"}


class ReportedResult(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One number that the study prints, beside the measured number."""

    where: str
    """The place in the study."""
    metric: str
    """The name of the metric."""
    cell: dict[str, Any]
    """The filter for the cell."""
    printed: str
    """The number as printed."""
    kind: str
    """`measured` by the study, `estimated` (the study computed it) or `assumed` (nobody ran it)."""
    head: str = ""
    """The unit in the head of the table."""
    of: str = ""
    """The argument of the metric, such as the name of an operator, if it needs one."""
    unit: str = ""
    """Its unit."""
    row: str | None = None
    """The id of the one cell that the filter matches; absent if it matches none or several."""
    against: str = ""
    """The id of the cell with which the cell is compared, if the metric compares two cells."""
    reported: ParsedNumber | None = None
    """The printed number, parsed."""
    measured: float | str | None = None
    """The measured mean, or the state of the cell."""
    low: float | None = None
    """The lower end of its 95 % interval."""
    high: float | None = None
    """The upper end of its 95 % interval."""
    n: int = 0
    """Number of repeats."""
    how: str = ""
    """How the interval was computed, or why there is none."""
    comparable: bool = False
    """Whether the two numbers may be compared; false in a rehearsal, and if one of the numbers is missing."""
    delta: float | None = None
    """Measured - reported."""
    ratio: float | None = None
    """Measured / reported."""
    agrees: bool | None = None
    """Whether the measured interval and the range of the printed number overlap, or the measured number meets a printed bound
    or state. The last three are absent if the numbers cannot be compared in this way."""
    why: str = ""
    """Why a value is missing."""
    reasons: list[str] = []
    """Possible reasons for a difference."""
    notes: list[str] = []
    """Notes of the matrix on this place."""


def compare_reported_numbers(loaded: LoadedMatrix, measurements: Measurements) -> list[ReportedResult]:
    """Compare every number of the study that the matrix lists with the measurements, in the order of the matrix."""
    return [_compare_reported_number(loaded, measurements, entry) for entry in loaded.expansion.reported]


def _compare_reported_number(loaded: LoadedMatrix, measurements: Measurements, reported_entry: Reported) -> ReportedResult:
    result = ReportedResult(
        where=reported_entry.where,
        metric=reported_entry.metric,
        cell=reported_entry.cell,
        printed=reported_entry.printed,
        kind=reported_entry.kind,
        head=reported_entry.unit or "",
        of=reported_entry.of or "",
        notes=reasons.find_notes_at(loaded, reported_entry.where),
    )
    try:
        uncertain_number: UncertainNumber | None = None
        if result.metric == STATE_METRIC:
            cell_row, state = measurements.find_state(result.cell)
            result.measured, result.n = state, len(cell_row.runs)
        else:
            selected_metric = measurements.find_metric(result.metric, result.cell, reported_entry.of, reported_entry.against)
            uncertain_number = UncertainNumber(measurements, selected_metric)
            cell_row = selected_metric.row
            result.against = selected_metric.compared_pair[1].row.id if selected_metric.compared_pair else ""
            result.measured, result.low = uncertain_number.value, uncertain_number.low
            result.high, result.n = uncertain_number.high, uncertain_number.n
            result.how, result.unit = uncertain_number.how, selected_metric.unit
        result.row = cell_row.id
    except NoMeasurement as unanswered:
        result.why = unanswered.why
    metric_or_none = measurements.metrics.get(result.metric)
    try:
        if metric_or_none is not None or result.metric == STATE_METRIC:
            is_change = metric_or_none is not None and metric_or_none.of_cells is not None
            metric_unit = metric_or_none.unit if metric_or_none else ""
            result.reported = parse_number(result.printed, reported_entry.unit, metric_unit, is_change=is_change)
    except ValueError as error:
        result.why = "; ".join(filter(None, (result.why, str(error))))
    if result.row is None or result.reported is None:
        return result
    loaded_cell = measurements.cell(cell_row)
    if rehearsal_reason := reasons.explain_rehearsal(loaded_cell):
        result.reasons = [*reasons.list_adaptation_clauses(reported_entry), rehearsal_reason]
        return result
    result.reasons = [
        *reasons.list_adaptation_clauses(reported_entry),
        *_list_doubt_clauses(result, uncertain_number),
        *reasons.list_likely_reasons(loaded, loaded_cell, cell_row, {result.metric}),
    ]
    if uncertain_number and len({part.row.id for part in uncertain_number.selected.parts if not part.metric.exact}) > 1:
        unproven_labels = [measurements.label(part.row) for part in uncertain_number.selected.parts if not part.row.is_ranked]
        if gpu_troubles := [part.row.gpu_trouble for part in uncertain_number.selected.parts if part.row.gpu_trouble]:
            result.why = (
                f"not compared, because GPUs were shared, throttled or faulty while steps were timed: {'; '.join(gpu_troubles)}"
            )
            return result
        if unproven_labels:
            result.why = f"not compared, because these cells are not known to do the same work: {'; '.join(unproven_labels)}"
            return result
    _set_agreement(result, result.reported)
    return result


def _list_doubt_clauses(reported: ReportedResult, number: UncertainNumber | None) -> list[str]:
    """Clauses that say why the printed number is doubtful, or why the measured number is of another kind than the printed
    number."""
    clause_of_kind = {
        "estimated": "the study computed its number",
        "assumed": "the study assumed its number: nobody measured it",
    }
    printed_remark = reported.reported.remark if reported.reported else ""
    measured_kind = number.selected.parts[0].kind if number else ""
    kind_clause = f"measured here: {measured_kind}" if measured_kind in _KINDS_OF_CPU else ""
    return [clause for clause in (clause_of_kind.get(reported.kind, ""), printed_remark, kind_clause) if clause]


def _set_agreement(result: ReportedResult, printed_number: ParsedNumber) -> None:
    if isinstance(result.measured, str) or printed_number.state:
        result.comparable = isinstance(result.measured, str) and bool(printed_number.state)
        result.agrees = result.measured == printed_number.state if result.comparable else None
        return
    assert result.measured is not None
    assert printed_number.value is not None
    if printed_number.unit != result.unit:
        result.why = f"printed in {printed_number.unit or 'plain numbers'}, measured in {result.unit or 'plain numbers'}"
        return
    result.comparable = True
    low, high = (result.measured, result.measured) if result.low is None or result.high is None else (result.low, result.high)
    if printed_number.relation == "=":
        result.delta = result.measured - printed_number.value
        result.ratio = result.measured / printed_number.value if printed_number.value else None
        if result.low is None:
            return
        assert printed_number.low is not None
        assert printed_number.high is not None
        result.agrees = low <= printed_number.high and printed_number.low <= high
    elif result.low is not None:
        result.agrees = high > printed_number.value if printed_number.relation == ">" else low < printed_number.value
