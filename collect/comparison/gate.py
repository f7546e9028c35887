"""The gate of `collect compare --fail-if`: whether the repeats show that a metric of B is worse than a bound, relative to A."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from collect.comparison import ratio
from collect.comparison.compare import ComparedCell, Comparison, Gate, GatedCell, MetricComparison
from collect.metric import load_metrics
from shardlab.errors import InputError, UnknownName
from shardlab.terminal import notation

_CONDITION_PATTERN = re.compile(r"\s*(\w+)\s*([<>]=?)\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*", re.ASCII)
_UNIT_SUFFIXES = ("_per_s", "_ms", "_us", "_s", "_bytes", "_pct", "_j", "_w")  # a short name of a metric leaves its unit out


class Condition(msgspec.Struct, frozen=True):
    """A condition under which a comparison fails, such as `throughput < 0.95`: the ratio B / A of throughput is below 0.95."""

    text: str
    metric: str
    """The full name of the metric."""
    operator: str
    """<, <=, > or >=."""
    threshold: float
    """The ratio with which B / A is compared."""


def parse_condition(condition_text: str) -> Condition:
    """Parse the value of --fail-if. Raises InputError if it is not METRIC SIGN NUMBER, or if the metric is not known."""
    match = _CONDITION_PATTERN.fullmatch(condition_text)
    threshold = float(match[3]) if match is not None else 0.0
    if match is None or not 0 < threshold < math.inf:
        raise InputError(
            f"--fail-if: found {condition_text!r}. Allowed: a metric, one of < <= > >=, and a ratio B / A above 0, such as "
            '"throughput < 0.95".'
        )
    metric_names = [metric.name for metric in load_metrics() if metric.of_run]
    full_names = [name for name in metric_names if name in (match[1], *(match[1] + unit for unit in _UNIT_SUFFIXES))]
    if not full_names:
        raise UnknownName("metric of a run", match[1], metric_names, place="--fail-if")
    if len(full_names) > 1 and match[1] not in full_names:
        raise InputError(f"--fail-if: {match[1]!r} may be each of {', '.join(full_names)}. Allowed: the full name.")
    return Condition(condition_text, match[1] if match[1] in full_names else full_names[0], match[2], threshold)


def judge_condition(condition: Condition, comparison: Comparison) -> Gate:
    """Judge a condition for every cell of A."""
    gated_cells = [_judge_cell(condition, pair) for pair in comparison.pairs]
    gated_cells += [GatedCell(label, "not judged", "B does not have this cell") for label in comparison.only_a]
    return Gate(condition.text, condition.metric, gated_cells)


def choose_exit_code(gates: Sequence[Gate], *, is_strict: bool) -> int:
    """1 if a cell fails, or if a gate could judge no cell; with `is_strict` also if a gate did not decide for each cell."""
    verdicts_of_gates = [{cell.verdict for cell in gate.cells} for gate in gates]
    are_failing = [
        "fails" in gate_verdicts or gate_verdicts <= {"not judged"} or (is_strict and not gate_verdicts <= {"fails", "passes"})
        for gate_verdicts in verdicts_of_gates
    ]
    return int(any(are_failing))


def describe_gate(gate: Gate) -> list[str]:
    """Sentences about a gate: its counts, and a line for each cell that does not pass."""
    count_by_verdict = Counter(cell.verdict for cell in gate.cells)
    counts_text = ", ".join(f"{count} {verdict}" for verdict, count in sorted(count_by_verdict.items())) or "no cell to judge"
    lines = [f"{cell.verdict}: {cell.label}: {cell.why}" for cell in gate.cells if cell.verdict != "passes"]
    return [f"--fail-if {gate.condition!r} ({gate.metric}, B / A): {counts_text}", *lines]


def _judge_cell(condition: Condition, pair: ComparedCell) -> GatedCell:
    compared = next((compared for compared in pair.metrics if compared.metric == condition.metric), None)
    if compared is None:
        states = f"A: {pair.state_a}; B: {pair.state_b}"
        return GatedCell(pair.label, "not judged", pair.different_work or f"no value of {condition.metric} in both ({states})")
    if compared.ratio is None or compared.low is None or compared.high is None:
        repeats_hint = ". Three or more repeats of each cell show it" if 1 in (compared.n_a, compared.n_b) else ""
        return GatedCell(pair.label, "undecided", f"{compared.why}{repeats_hint}")
    is_failing_at_ends = [_is_failing(condition, interval_end) for interval_end in (compared.low, compared.high)]
    number_texts = [notation.format_number(number) for number in (compared.ratio, compared.low, compared.high)]
    ratio_text = "B / A is {}, with a 95 % interval from {} to {}".format(*number_texts)
    if is_failing_at_ends[0] == is_failing_at_ends[1]:
        return GatedCell(pair.label, "fails" if is_failing_at_ends[0] else "passes", ratio_text)
    return GatedCell(pair.label, "undecided", f"{ratio_text}; {_describe_deciding_repeats(condition.threshold, compared)}")


def _is_failing(condition: Condition, compared_ratio: float) -> bool:
    if compared_ratio == condition.threshold:
        return condition.operator in ("<=", ">=")
    return (compared_ratio < condition.threshold) == condition.operator.startswith("<")


def _describe_deciding_repeats(threshold: float, metric: MetricComparison) -> str:
    assert metric.error_a is not None and metric.error_b is not None  # noqa: PT018 - the ratio has an interval
    relative_deviations = (metric.error_a / metric.a * math.sqrt(metric.n_a), metric.error_b / metric.b * math.sqrt(metric.n_b))
    least_repeats = max(2, min(metric.n_a, metric.n_b) + 1)
    repeat_count = ratio.count_deciding_repeats(relative_deviations, metric.b / metric.a, threshold, least_repeats)
    number_text = f"more than {ratio.MOST_REPEATS}" if repeat_count is None else f"about {repeat_count}"
    return (
        f"{number_text} repeats in A and in B would decide, if the ratio and the scatter stay as they are (n = "
        f"{metric.n_a} and {metric.n_b})"
    )
