"""The gate of `collect compare --fail-if`: whether the repeats show that a metric of B is worse than a bound, relative to A."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from collect.comparison import ratio
from collect.comparison.compare import ComparedCell, Comparison, Gate, GatedCell, MetricComparison
from collect.metric import all_metrics
from shardlab.errors import InputError, UnknownName
from shardlab.terminal import notation

_CONDITION = re.compile(r"\s*(\w+)\s*([<>]=?)\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*", re.ASCII)
_UNITS = ("_per_s", "_ms", "_us", "_s", "_bytes", "_pct", "_j", "_w")  # a short name of a metric leaves its unit out


class Condition(msgspec.Struct, frozen=True):
    """A condition under which a comparison fails, such as `throughput < 0.95`: the ratio B / A of throughput is below 0.95."""

    text: str
    metric: str
    """The full name of the metric."""
    operator: str
    """<, <=, > or >=."""
    threshold: float
    """The ratio with which B / A is compared."""


def parse_condition(text: str) -> Condition:
    """Parse the value of --fail-if. Raises InputError if it is not METRIC SIGN NUMBER, or if the metric is not known."""
    match = _CONDITION.fullmatch(text)
    threshold = float(match[3]) if match is not None else 0.0
    if match is None or not 0 < threshold < math.inf:
        raise InputError(
            f"--fail-if: found {text!r}. Allowed: a metric, one of < <= > >=, and a ratio B / A above 0, such as "
            '"throughput < 0.95".'
        )
    names = [metric.name for metric in all_metrics() if metric.of_run]
    full_names = [name for name in names if name in (match[1], *(match[1] + unit for unit in _UNITS))]
    if not full_names:
        raise UnknownName("metric of a run", match[1], names, place="--fail-if")
    if len(full_names) > 1 and match[1] not in full_names:
        raise InputError(f"--fail-if: {match[1]!r} may be each of {', '.join(full_names)}. Allowed: the full name.")
    return Condition(text, match[1] if match[1] in full_names else full_names[0], match[2], threshold)


def judge_condition(condition: Condition, comparison: Comparison) -> Gate:
    """Judge a condition for every cell of A."""
    cells = [_judge_cell(condition, pair) for pair in comparison.pairs]
    cells += [GatedCell(label, "not judged", "B does not have this cell") for label in comparison.only_a]
    return Gate(condition.text, condition.metric, cells)


def choose_exit_code(gates: Sequence[Gate], *, is_strict: bool) -> int:
    """1 if a cell fails, or if a gate could judge no cell; with `is_strict` also if a gate did not decide for each cell."""
    verdicts = [{cell.verdict for cell in gate.cells} for gate in gates]
    failing = [
        "fails" in gate_verdicts or gate_verdicts <= {"not judged"} or (is_strict and not gate_verdicts <= {"fails", "passes"})
        for gate_verdicts in verdicts
    ]
    return int(any(failing))


def describe_gate(gate: Gate) -> list[str]:
    """Sentences about a gate: its counts, and a line for each cell that does not pass."""
    counts = Counter(cell.verdict for cell in gate.cells)
    counts_text = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) or "no cell to judge"
    lines = [f"{cell.verdict}: {cell.label}: {cell.why}" for cell in gate.cells if cell.verdict != "passes"]
    return [f"--fail-if {gate.condition!r} ({gate.metric}, B / A): {counts_text}", *lines]


def _judge_cell(condition: Condition, pair: ComparedCell) -> GatedCell:
    metric = next((metric for metric in pair.metrics if metric.metric == condition.metric), None)
    if metric is None:
        states = f"A: {pair.state_a}; B: {pair.state_b}"
        return GatedCell(pair.label, "not judged", pair.different_work or f"no value of {condition.metric} in both ({states})")
    if metric.ratio is None or metric.low is None or metric.high is None:
        hint = ". Three or more repeats of each cell show it" if 1 in (metric.n_a, metric.n_b) else ""
        return GatedCell(pair.label, "undecided", f"{metric.why}{hint}")
    is_failing_at_ends = [_is_failing(condition, end) for end in (metric.low, metric.high)]
    number_texts = [notation.format_number(number) for number in (metric.ratio, metric.low, metric.high)]
    why = "B / A is {}, with a 95 % interval from {} to {}".format(*number_texts)
    if is_failing_at_ends[0] == is_failing_at_ends[1]:
        return GatedCell(pair.label, "fails" if is_failing_at_ends[0] else "passes", why)
    return GatedCell(pair.label, "undecided", f"{why}; {_describe_deciding_repeats(condition.threshold, metric)}")


def _is_failing(condition: Condition, value: float) -> bool:
    if value == condition.threshold:
        return condition.operator in ("<=", ">=")
    return (value < condition.threshold) == condition.operator.startswith("<")


def _describe_deciding_repeats(threshold: float, metric: MetricComparison) -> str:
    assert metric.error_a is not None and metric.error_b is not None  # noqa: PT018 - the ratio has an interval
    deviations = (metric.error_a / metric.a * math.sqrt(metric.n_a), metric.error_b / metric.b * math.sqrt(metric.n_b))
    least_repeats = max(2, min(metric.n_a, metric.n_b) + 1)
    repeats = ratio.count_deciding_repeats(deviations, metric.b / metric.a, threshold, least_repeats)
    number_text = f"more than {ratio.MOST_REPEATS}" if repeats is None else f"about {repeats}"
    return (
        f"{number_text} repeats in A and in B would decide, if the ratio and the scatter stay as they are "
        f"(n = {metric.n_a} and {metric.n_b})"
    )
