"""Compares each number that a study prints with the number that was measured here for the same metric and cell."""

from __future__ import annotations

from typing import Any

import msgspec

from collect.metric import Metric
from collect.metrics.memory import KINDS
from collect.reading.load import Loaded
from collect.verdicts import reasons
from collect.verdicts.printed_number import Printed, parse
from collect.verdicts.selection import STATE, Measurements, NoMeasurement
from collect.verdicts.uncertain_number import Number
from shardlab.matrix.study import Reported

_OF_A_CPU = {KINDS["rss_bytes"], "cpu"}  # kinds of numbers measured on a CPU; a study on GPUs measures them in another way


class ReportedResult(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One number that the study prints, beside the measured number.

    where: the place in the study. metric: the name of the metric. printed: the number as printed.
    cell: the filter for the cell. row: the id of the one cell that the filter matches; absent if it matches none or several.
    kind: `measured` by the study, `estimated` (the study computed it) or `assumed` (nobody ran it).
    head: the unit in the head of the table. of: the argument of the metric, such as the name of an operator, if it needs one.
    against: the id of the cell with which the cell is compared, if the metric compares two cells.
    reported: the printed number, parsed.
    measured: the measured mean, or the state of the cell. low, high: its 95 % interval. unit: its unit. n: number of repeats.
    how: how the interval was computed, or why there is none.
    comparable: whether the two numbers may be compared; false in a rehearsal, and if one of the numbers is missing.
    delta: measured - reported. ratio: measured / reported.
    agrees: whether the measured interval and the range of the printed number overlap, or the measured number meets a printed
    bound or state. The last three are absent if the numbers cannot be compared in this way.
    why: why a value is missing. reasons: possible reasons for a difference. notes: notes of the matrix on this place.
    """

    where: str
    metric: str
    cell: dict[str, Any]
    printed: str
    kind: str
    head: str = ""
    of: str = ""
    unit: str = ""
    row: str | None = None
    against: str = ""
    reported: Printed | None = None
    measured: float | str | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    how: str = ""
    comparable: bool = False
    delta: float | None = None
    ratio: float | None = None
    agrees: bool | None = None
    why: str = ""
    reasons: list[str] = []
    notes: list[str] = []


def beside(loaded: Loaded, measurements: Measurements) -> list[ReportedResult]:
    """Compare every number of the study that the matrix lists with the measurements, in the order of the matrix."""
    return [_beside(loaded, measurements, entry) for entry in loaded.expansion.reported]


def _beside(loaded: Loaded, measurements: Measurements, entry: Reported) -> ReportedResult:
    found = ReportedResult(
        where=entry.where,
        metric=entry.metric,
        cell=entry.cell,
        printed=entry.printed,
        kind=entry.kind,
        head=entry.unit or "",
        of=entry.of or "",
        notes=reasons.notes(loaded, entry.where),
    )
    try:
        number: Number | None = None
        if found.metric == STATE:
            row, state = measurements.state(found.cell)
            found.measured, found.n = state, len(row.runs)
        else:
            sought = measurements.find(found.metric, found.cell, entry.of, entry.against)
            number = Number(measurements, sought)
            row = sought.row
            found.against = sought.beside[1].row.id if sought.beside else ""
            found.measured, found.low, found.high = number.value, number.low, number.high
            found.n, found.how, found.unit = number.n, number.how, number.found.unit
        found.row = row.id
    except NoMeasurement as unanswered:
        found.why = unanswered.why
    metric = measurements.metrics.get(found.metric)
    try:
        if metric is not None or found.metric == STATE:
            found.reported = parse(found.printed, entry.unit, metric.unit if metric else "", change=_is_change(metric))
    except ValueError as error:
        found.why = "; ".join(filter(None, (found.why, str(error))))
    if found.row is None or found.reported is None:
        return found
    cell = measurements.cell(row)
    if rehearsal := reasons.rehearsal(cell):
        found.reasons = [*reasons.adapted(entry), rehearsal]
        return found
    found.reasons = [*reasons.adapted(entry), *_doubts(found, number), *reasons.likely(loaded, cell, row, {found.metric})]
    if number and len({part.row.id for part in number.found.parts if not part.metric.exact}) > 1:
        unproven = [measurements.label(part.row) for part in number.found.parts if not part.row.is_ranked]
        if trouble := [part.row.gpu_trouble for part in number.found.parts if part.row.gpu_trouble]:
            found.why = (
                f"not compared, because GPUs were shared, throttled or faulty while steps were timed: {'; '.join(trouble)}"
            )
            return found
        if unproven:
            found.why = f"not compared, because these cells are not known to do the same work: {'; '.join(unproven)}"
            return found
    _compare(found, found.reported)
    return found


def _is_change(metric: Metric | None) -> bool:
    """Whether a metric compares two cells, so that its value may be printed with a plus sign."""
    return metric is not None and metric.of_cells is not None


def _doubts(found: ReportedResult, number: Number | None) -> list[str]:
    """Clauses that say why the printed number is doubtful, or why the measured number is of another kind than the printed
    number."""
    kinds = {"estimated": "the study computed its number", "assumed": "the study assumed its number: nobody measured it"}
    remark = found.reported.remark if found.reported else ""
    kind = number.found.parts[0].kind if number else ""
    other = f"measured here: {kind}" if kind in _OF_A_CPU else ""
    return [clause for clause in (kinds.get(found.kind, ""), remark, other) if clause]


def _compare(found: ReportedResult, printed: Printed) -> None:
    if isinstance(found.measured, str) or printed.state:
        found.comparable = isinstance(found.measured, str) and bool(printed.state)
        found.agrees = found.measured == printed.state if found.comparable else None
        return
    assert found.measured is not None
    assert printed.value is not None
    if printed.unit != found.unit:
        found.why = f"printed in {printed.unit or 'plain numbers'}, measured in {found.unit or 'plain numbers'}"
        return
    found.comparable = True
    low, high = (found.measured, found.measured) if found.low is None or found.high is None else (found.low, found.high)
    if printed.relation == "=":
        found.delta = found.measured - printed.value
        found.ratio = found.measured / printed.value if printed.value else None
        if found.low is None:
            return
        assert printed.low is not None
        assert printed.high is not None
        found.agrees = low <= printed.high and printed.low <= high
    elif found.low is not None:
        found.agrees = high > printed.value if printed.relation == ">" else low < printed.value
