"""Writes verdicts and reported numbers as text, which the terminal and the page of a report both use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from collect.summary import Summary
from collect.verdicts import reasons
from collect.verdicts.claims import ClaimNumber, Verdict
from collect.verdicts.printed_number import COUNT_UNITS
from collect.verdicts.reported import ReportedResult
from collect.verdicts.uncertain_number import ALONE_TEXT, POOLED_TEXT
from shardlab.terminal import notation

VERDICT_STYLES = {"reproduced": "green", "contradicted": "red", "undecided": "yellow", "ambiguous": "yellow", "not run": "dim"}
REHEARSAL_CAUTION = "verdicts of a rehearsal show that claims can be judged, not whether they hold"
ILLUSTRATIVE_CAUTION = "illustrative: the study ran nothing itself, its numbers are assumed or computed"


class ReportedLine(msgspec.Struct, frozen=True):
    """One reported number (a number that the study prints) as text, beside the measured number."""

    entry: ReportedResult
    cell: str
    """The label of the cell, or the filter for cells if it does not match exactly one cell."""
    printed: str
    """The number as printed."""
    measured: str
    """The measured mean."""
    interval: str
    """Its 95 % interval."""
    ratio: str
    """Measured / printed."""
    agreement: str
    """"agrees", "differs" or ""."""
    remarks: str
    """Reasons and remarks about this number alone."""
    own_remarks: str
    """`remarks` without the clause about a rehearsal, because the page shows this clause beside the cell."""


def label_verdict(verdict: Verdict) -> str:
    """The verdict as text, followed by "(rehearsal)" if the runs were a rehearsal."""
    return f"{verdict.verdict} (rehearsal)" if verdict.rehearsal else verdict.verdict


def count_verdicts(summary: Summary) -> str:
    """How many claims have each verdict, as text such as `12 claims: 7 reproduced, 2 contradicted, 3 not run`."""
    count_by_verdict = Counter(verdict.verdict for verdict in summary.verdicts)
    counts_text = ", ".join(f"{count_by_verdict[name]} {name}" for name in VERDICT_STYLES if count_by_verdict[name])  # type: ignore[index]
    return f"{len(summary.verdicts)} claims: {counts_text}"


def list_verdict_cautions(summary: Summary) -> list[str]:
    """The warnings that apply to all verdicts: that the runs were a rehearsal, and that the study measured nothing itself."""
    cautions = [REHEARSAL_CAUTION] if any(verdict.rehearsal for verdict in summary.verdicts) else []
    return cautions + ([ILLUSTRATIVE_CAUTION] if summary.illustrative else [])


def describe_claim_number(number: ClaimNumber) -> str:
    """A number in the test of a claim, as text: `call = 58.2 s (57.9 to 58.5, n = 3)`."""
    if isinstance(number.value, str):
        return f"{number.call} = {number.value}"
    detail_texts = [f"n = {number.n}", number.how] if number.how not in ("", ALONE_TEXT) else [number.how or f"n = {number.n}"]
    if number.low is not None and number.high is not None and number.low != number.high:
        detail_texts.insert(0, format_interval(number.low, number.high, number.unit))
    return f"{number.call} = {format_quantity(number.value, number.unit)} ({', '.join(detail_texts)})"


def format_quantity(value: float, unit: str) -> str:
    """A number with its unit. Bytes are given in powers of 1,000 (KB, MB, GB), as studies print them."""
    unit_name, unit_size = choose_decimal_unit(value, unit)
    if unit in COUNT_UNITS and float(value).is_integer():
        return f"{value:,.0f} {unit.removesuffix('s') if value == 1 else unit}".rstrip()
    return f"{notation.format_number(value / unit_size)} {unit_name}".rstrip()


def choose_decimal_unit(value: float, unit: str) -> tuple[str, float]:
    """(the unit in which a value is written, its size): for bytes the largest power of 1,000 up to the value, else `unit`."""
    decimal_units = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if unit == "bytes" else ()
    return next(((name, size) for name, size in decimal_units if abs(value) >= size), (unit, 1.0))


def format_interval(lowest: float, highest: float, unit: str) -> str:
    """An interval as text, such as `57.9 to 58.5 s`."""
    return join_range(format_quantity(lowest, unit), format_quantity(highest, unit))


def join_range(low_text: str, high_text: str) -> str:
    """Two numbers with their units as a range, which has a common unit once."""
    low_number, _, low_unit = low_text.partition(" ")
    return f"{low_number if low_unit == high_text.partition(' ')[2] else low_text} to {high_text}"


def find_common_reasons(summary: Summary) -> list[str]:
    """The reasons for a difference that apply to all reported numbers that may be compared with a measured number.

    If no reported number may be compared, the reasons that apply to all reported numbers that were also measured here.
    """
    comparable_reasons = [entry.reasons for entry in summary.reported if entry.comparable]
    reason_lists = comparable_reasons or [entry.reasons for entry in summary.reported if entry.measured is not None]
    return reasons.find_common_clauses(reason_lists)


def join_assumed_reasons(clauses: Sequence[str]) -> list[str]:
    """The reasons for a difference, with all reasons about assumed values joined into one reason."""
    assumed = [clause.removeprefix(reasons.ASSUMED_PREFIX) for clause in clauses if clause.startswith(reasons.ASSUMED_PREFIX)]
    other_clauses = [clause for clause in clauses if not clause.startswith(reasons.ASSUMED_PREFIX)]
    return [*other_clauses, *([reasons.ASSUMED_PREFIX + ", ".join(assumed)] if assumed else [])]


def make_reported_lines(summary: Summary, labels: Mapping[str, str]) -> list[ReportedLine]:
    """Every number that the study prints as text, without the reasons that apply to all of them (`find_common_reasons`).

    labels: {id of a cell: its label}.
    """
    shared_reasons = find_common_reasons(summary)
    return [_make_reported_line(entry, labels, shared_reasons) for entry in summary.reported]


def uses_pooled_noise(summary: Summary) -> bool:
    """Whether the interval of any measured number was computed from the noise of all repeated cells."""
    return any(entry.how == POOLED_TEXT for entry in summary.reported)


def count_reported(summary: Summary) -> str:
    """How many numbers the study prints and how many of them agree, as text.

    For example: `reported numbers: 46 printed, 14 measured here, 12 to compare: 9 agree, 3 differ`.
    """
    comparable = [entry for entry in summary.reported if entry.comparable]
    counts = Counter({True: "agree", False: "differ", None: "without an interval"}[entry.agrees] for entry in comparable)
    measured_count = sum(entry.measured is not None for entry in summary.reported)
    agreement_texts = ", ".join(f"{counts[word]} {word}" for word in ("agree", "differ", "without an interval") if counts[word])
    comparison_text = f"{len(comparable)} to compare: {agreement_texts}" if comparable else "none to compare"
    return f"reported numbers: {len(summary.reported)} printed, {measured_count} measured here, {comparison_text}"


def _make_reported_line(entry: ReportedResult, labels: Mapping[str, str], shared_reasons: Sequence[str]) -> ReportedLine:
    measured_text = interval = ""
    if isinstance(entry.measured, str):
        measured_text = entry.measured
    elif entry.measured is not None:
        measured_text = format_quantity(entry.measured, entry.unit)
        if entry.low is not None and entry.high is not None and entry.low != entry.high:
            interval = format_interval(entry.low, entry.high, entry.unit)
    own_reasons = [
        clause for clause in entry.reasons if clause not in shared_reasons and not clause.startswith(reasons.ASSUMED_PREFIX)
    ]
    remark_clauses = [clause for clause in (entry.why, *own_reasons, entry.how if entry.how == ALONE_TEXT else "") if clause]
    filter_text = ", ".join(f"{key} {value}" for key, value in entry.cell.items())
    return ReportedLine(
        entry=entry,
        cell=(labels[entry.row] if entry.row else filter_text)
        + (f", against {labels[entry.against]}" if entry.against else ""),
        printed=_describe_printed_number(entry),
        measured=measured_text,
        interval=interval,
        ratio=f"{notation.format_number(entry.ratio, 3)}" if entry.ratio is not None else "",
        agreement={True: "agrees", False: "differs", None: ""}[entry.agrees],
        remarks="; ".join(remark_clauses),
        own_remarks="; ".join(clause for clause in remark_clauses if not clause.startswith(reasons.REHEARSAL_PREFIX)),
    )


def _describe_printed_number(entry: ReportedResult) -> str:
    """The text of a reported number: the number as the study prints it, then the unit from the head of the study's table.

    If neither the number nor the head of the table has a unit, the parsed value follows in parentheses: `0.92 (92.00 %)`.
    """
    if entry.head:
        return f"{entry.printed} {entry.head}"
    printed_number = entry.reported
    if (
        printed_number
        and printed_number.unit not in COUNT_UNITS
        and entry.printed.strip("~<> ").replace(",", "").replace(".", "").isdigit()
    ):
        return f"{entry.printed} ({format_quantity(printed_number.value or 0, printed_number.unit)})"
    return entry.printed
