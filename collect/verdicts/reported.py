"""Compares each number that a study prints with the number that was measured here for the same metric and cell."""

from __future__ import annotations

from typing import Any

import msgspec

from collect.metric import Metric
from collect.metrics.memory import KINDS
from collect.reading.load import Loaded
from collect.verdicts import reasons
from collect.verdicts.printed_number import ParsedNumber, parse_number
from collect.verdicts.selection import STATE_METRIC, Measurements, NoMeasurement
from collect.verdicts.uncertain_number import UncertainNumber
from shardlab.matrix.study import Reported

_OF_A_CPU = {KINDS["rss_bytes"], "cpu"}  # kinds of numbers measured on a CPU; a study on GPUs measures them in another way


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


def _compare_reported_number(loaded: Loaded, measurements: Measurements, entry: Reported) -> ReportedResult:
    result = ReportedResult(
        where=entry.where,
        metric=entry.metric,
        cell=entry.cell,
        printed=entry.printed,
        kind=entry.kind,
        head=entry.unit or "",
        of=entry.of or "",
        notes=reasons.notes_at(loaded, entry.where),
    )
    try:
        number: UncertainNumber | None = None
        if result.metric == STATE_METRIC:
            row, state = measurements.state(result.cell)
            result.measured, result.n = state, len(row.runs)
        else:
            selected_metric = measurements.find(result.metric, result.cell, entry.of, entry.against)
            number = UncertainNumber(measurements, selected_metric)
            row = selected_metric.row
            result.against = selected_metric.compared_pair[1].row.id if selected_metric.compared_pair else ""
            result.measured, result.low, result.high = number.value, number.low, number.high
            result.n, result.how, result.unit = number.n, number.how, number.selected.unit
        result.row = row.id
    except NoMeasurement as unanswered:
        result.why = unanswered.why
    metric = measurements.metrics.get(result.metric)
    try:
        if metric is not None or result.metric == STATE_METRIC:
            result.reported = parse_number(result.printed, entry.unit, metric.unit if metric else "", change=_is_change(metric))
    except ValueError as error:
        result.why = "; ".join(filter(None, (result.why, str(error))))
    if result.row is None or result.reported is None:
        return result
    cell = measurements.cell(row)
    if rehearsal := reasons.rehearsal_reason(cell):
        result.reasons = [*reasons.adaptation_clauses(entry), rehearsal]
        return result
    result.reasons = [
        *reasons.adaptation_clauses(entry),
        *_doubt_clauses(result, number),
        *reasons.likely_reasons(loaded, cell, row, {result.metric}),
    ]
    if number and len({part.row.id for part in number.selected.parts if not part.metric.exact}) > 1:
        unproven = [measurements.label(part.row) for part in number.selected.parts if not part.row.is_ranked]
        if trouble := [part.row.gpu_trouble for part in number.selected.parts if part.row.gpu_trouble]:
            result.why = (
                f"not compared, because GPUs were shared, throttled or faulty while steps were timed: {'; '.join(trouble)}"
            )
            return result
        if unproven:
            result.why = f"not compared, because these cells are not known to do the same work: {'; '.join(unproven)}"
            return result
    _set_agreement(result, result.reported)
    return result


def _is_change(metric: Metric | None) -> bool:
    """Whether a metric compares two cells, so that its value may be printed with a plus sign."""
    return metric is not None and metric.of_cells is not None


def _doubt_clauses(result: ReportedResult, number: UncertainNumber | None) -> list[str]:
    """Clauses that say why the printed number is doubtful, or why the measured number is of another kind than the printed
    number."""
    kinds = {"estimated": "the study computed its number", "assumed": "the study assumed its number: nobody measured it"}
    remark = result.reported.remark if result.reported else ""
    kind = number.selected.parts[0].kind if number else ""
    kind_clause = f"measured here: {kind}" if kind in _OF_A_CPU else ""
    return [clause for clause in (kinds.get(result.kind, ""), remark, kind_clause) if clause]


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
