"""Compares each number that a study prints with the number that was measured here for the same metric and cell."""

from __future__ import annotations

from typing import Any

import msgspec

from collect.metric import Metric
from collect.metrics.memory import MEMORY_KINDS
from collect.reading.load import Loaded
from collect.verdicts import reasons
from collect.verdicts.printed_number import ParsedNumber, parse_number
from collect.verdicts.selection import STATE, Measurements, NoMeasurement
from collect.verdicts.uncertain_number import UncertainNumber
from shardlab.matrix.study import Reported

_OF_A_CPU = {
    MEMORY_KINDS["rss_bytes"],
    "cpu",
}  # kinds of numbers measured on a CPU; a study on GPUs measures them in another way


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


def compare_reported_numbers(loaded: Loaded, measurements: Measurements) -> list[ReportedResult]:
    """Compare every number of the study that the matrix lists with the measurements, in the order of the matrix."""
    return [_compare_reported_number(loaded, measurements, entry) for entry in loaded.expansion.reported]


def _compare_reported_number(loaded: Loaded, measurements: Measurements, reported_entry: Reported) -> ReportedResult:
    reported_result = ReportedResult(
        where=reported_entry.where,
        metric=reported_entry.metric,
        cell=reported_entry.cell,
        printed=reported_entry.printed,
        kind=reported_entry.kind,
        head=reported_entry.unit or "",
        of=reported_entry.of or "",
        notes=reasons.notes_at(loaded, reported_entry.where),
    )
    try:
        uncertain_number: UncertainNumber | None = None
        if reported_result.metric == STATE:
            row, state = measurements.state(reported_result.cell)
            reported_result.measured, reported_result.n = state, len(row.runs)
        else:
            selected_metric = measurements.find(
                reported_result.metric, reported_result.cell, reported_entry.of, reported_entry.against
            )
            uncertain_number = UncertainNumber(measurements, selected_metric)
            row = selected_metric.row
            reported_result.against = selected_metric.compared_pair[1].row.id if selected_metric.compared_pair else ""
            reported_result.measured, reported_result.low, reported_result.high = (
                uncertain_number.value,
                uncertain_number.low,
                uncertain_number.high,
            )
            reported_result.n, reported_result.how, reported_result.unit = (
                uncertain_number.n,
                uncertain_number.how,
                uncertain_number.selected.unit,
            )
        reported_result.row = row.id
    except NoMeasurement as unanswered:
        reported_result.why = unanswered.why
    metric = measurements.metrics.get(reported_result.metric)
    try:
        if metric is not None or reported_result.metric == STATE:
            reported_result.reported = parse_number(
                reported_result.printed, reported_entry.unit, metric.unit if metric else "", is_change=_is_change(metric)
            )
    except ValueError as error:
        reported_result.why = "; ".join(filter(None, (reported_result.why, str(error))))
    if reported_result.row is None or reported_result.reported is None:
        return reported_result
    cell = measurements.cell(row)
    if rehearsal_reason := reasons.rehearsal_reason(cell):
        reported_result.reasons = [*reasons.adaptation_clauses(reported_entry), rehearsal_reason]
        return reported_result
    reported_result.reasons = [
        *reasons.adaptation_clauses(reported_entry),
        *_doubt_clauses(reported_result, uncertain_number),
        *reasons.likely_reasons(loaded, cell, row, {reported_result.metric}),
    ]
    if uncertain_number and len({part.row.id for part in uncertain_number.selected.parts if not part.metric.exact}) > 1:
        unproven_labels = [measurements.label(part.row) for part in uncertain_number.selected.parts if not part.row.is_ranked]
        if gpu_troubles := [part.row.gpu_trouble for part in uncertain_number.selected.parts if part.row.gpu_trouble]:
            reported_result.why = (
                f"not compared, because GPUs were shared, throttled or faulty while steps were timed: {'; '.join(gpu_troubles)}"
            )
            return reported_result
        if unproven_labels:
            reported_result.why = (
                f"not compared, because these cells are not known to do the same work: {'; '.join(unproven_labels)}"
            )
            return reported_result
    _set_agreement(reported_result, reported_result.reported)
    return reported_result


def _is_change(metric: Metric | None) -> bool:
    """Whether a metric compares two cells, so that its value may be printed with a plus sign."""
    return metric is not None and metric.of_cells is not None


def _doubt_clauses(reported_result: ReportedResult, number: UncertainNumber | None) -> list[str]:
    """Clauses that say why the printed number is doubtful, or why the measured number is of another kind than the printed
    number."""
    clause_of_kind = {
        "estimated": "the study computed its number",
        "assumed": "the study assumed its number: nobody measured it",
    }
    remark = reported_result.reported.remark if reported_result.reported else ""
    kind = number.selected.parts[0].kind if number else ""
    kind_clause = f"measured here: {kind}" if kind in _OF_A_CPU else ""
    return [clause for clause in (clause_of_kind.get(reported_result.kind, ""), remark, kind_clause) if clause]


def _set_agreement(reported_result: ReportedResult, printed_number: ParsedNumber) -> None:
    if isinstance(reported_result.measured, str) or printed_number.state:
        reported_result.comparable = isinstance(reported_result.measured, str) and bool(printed_number.state)
        reported_result.agrees = reported_result.measured == printed_number.state if reported_result.comparable else None
        return
    assert reported_result.measured is not None
    assert printed_number.value is not None
    if printed_number.unit != reported_result.unit:
        reported_result.why = (
            f"printed in {printed_number.unit or 'plain numbers'}, measured in {reported_result.unit or 'plain numbers'}"
        )
        return
    reported_result.comparable = True
    low, high = (
        (reported_result.measured, reported_result.measured)
        if reported_result.low is None or reported_result.high is None
        else (reported_result.low, reported_result.high)
    )
    if printed_number.relation == "=":
        reported_result.delta = reported_result.measured - printed_number.value
        reported_result.ratio = reported_result.measured / printed_number.value if printed_number.value else None
        if reported_result.low is None:
            return
        assert printed_number.low is not None
        assert printed_number.high is not None
        reported_result.agrees = low <= printed_number.high and printed_number.low <= high
    elif reported_result.low is not None:
        reported_result.agrees = high > printed_number.value if printed_number.relation == ">" else low < printed_number.value
