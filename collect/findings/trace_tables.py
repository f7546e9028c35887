"""Makes tables of profiled cells: their collectives, their operators compared with the baseline, and the effect of rounding.

HolisticTraceAnalysis (HTA) rounds the times in traces, while the metrics of shardlab are exact by default.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from collect.findings.answer_section import REPEATS_COLUMN, AnswerSection, make_single_table_maker
from collect.findings.row import CellRow
from collect.metric import Metric, load_metrics
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.traces import per_step
from collect.traces.answer_columns import MOST_ROWS, make_name_column
from collect.traces.breakdown import Breakdown
from collect.traces.operators import OperatorChange, OperatorDifference, make_operator_columns
from collect.traces.per_step import OperatorUse
from shardlab.terminal.table import Column, Table

ROUNDED = ("idle_pct", "overlap_pct", "exposed_communication_ms")  # the metrics on which rounding has the largest effect


class Rounding(msgspec.Struct, frozen=True):
    """A trace metric of a cell, exact and as HolisticTraceAnalysis (HTA) rounds it, as means over n repeats."""

    cell: str
    metric: str
    unit: str
    n: int
    """Number of repeats."""
    exact: float
    """The exact value."""
    like_hta: float
    """The value as HTA rounds it."""
    difference: float
    """like_hta - exact."""


class Collective(msgspec.Struct, frozen=True):
    """A collective in a profiled step of a cell, as means over profiled ranks and n repeats.

    Durations include waiting for other ranks.
    """

    cell: str
    collective: str
    n: int
    """Number of repeats."""
    calls: float
    """Calls per step."""
    total_ms: float
    """Sum of the durations per step."""
    mean_ms: float
    """Duration of a call."""


class OperatorDifferences(msgspec.Struct, frozen=True):
    """The kernels or operators of a cell compared with its baseline, as means over profiled ranks and repeats."""

    cell: str
    baseline: str
    of: str
    """`kernels`, or `operators` on a CPU."""
    changes: dict[str, int]
    """Kind of change (new, gone, changed, same) -> number of names with this change."""
    differences: list[OperatorDifference]
    """The largest difference in time first."""


def list_roundings(loaded: LoadedMatrix) -> list[Rounding]:
    """The effect of HTA's rounding on metrics, for the cells whose traces are also evaluated as HTA evaluates them."""
    metric_by_name = {metric.name: metric for metric in load_metrics()}
    return [rounding for cell in loaded.cells for name in ROUNDED if (rounding := _build_rounding(cell, metric_by_name[name]))]


def list_runs_without_kernels(loaded: LoadedMatrix) -> tuple[list[str], int]:
    """(ids of the runs whose trace metrics are exact although the matrix asks for the metrics of HTA, number of all profiled
    runs).

    HTA cannot evaluate the runs in this list, because it finds no GPU kernels in one of their traces.
    """
    profiled_runs = [run for cell in loaded.cells for run in cell.completed_runs if run.breakdowns]
    wants_hta = loaded.expansion.traces == "like-hta"
    return [run.run_id for run in profiled_runs if wants_hta and not run.traces.like_hta], len(profiled_runs)


def list_collectives(loaded: LoadedMatrix) -> list[Collective]:
    """The collectives of every cell that was profiled by steps. The collectives of a cell are ordered by time, the longest
    first."""
    collectives = []
    for cell in loaded.cells:
        breakdowns_of_runs = _list_profiled_breakdowns(cell)
        use_by_collective = per_step.compute_uses_per_step(breakdowns_of_runs, lambda breakdown: breakdown.collectives)
        for collective, use in sorted(use_by_collective.items(), key=lambda item: (-item[1].total_ms, item[0])):
            collectives.append(
                Collective(cell.id, collective, len(breakdowns_of_runs), use.calls, use.total_ms, use.total_ms / use.calls)
            )
    return collectives


def compare_operators(loaded: LoadedMatrix, rows: Sequence[CellRow]) -> list[OperatorDifferences]:
    """Compare the kernels or operators of every cell with those of its baseline, if both were profiled in the same way.

    Kernels are not compared with operators.
    """
    cell_by_id = {cell.id: cell for cell in loaded.cells}
    comparisons = []
    for row in rows:
        if row.baseline is None or row.baseline == row.id:
            continue
        cell_runs, baseline_runs = (_list_profiled_breakdowns(cell_by_id[cell_id]) for cell_id in (row.id, row.baseline))
        if _collect_breakdown_kinds(cell_runs) != _collect_breakdown_kinds(baseline_runs) or not cell_runs:
            continue
        uses, baseline_uses = (
            per_step.compute_uses_per_step(runs, lambda breakdown: breakdown.kernels) for runs in (cell_runs, baseline_runs)
        )
        kind = "kernels" if cell_runs[0][0].source == "gpu" else "operators"
        differences = sorted(_diff_uses(uses, baseline_uses, "kernel" if kind == "kernels" else "cpu_op"), key=_make_sort_key)
        change_kinds = ("new", "gone", "changed", "same")
        count_by_change = {change: sum(difference.change == change for difference in differences) for change in change_kinds}
        comparisons.append(OperatorDifferences(row.id, row.baseline, kind, count_by_change, differences))
    return comparisons


def _build_rounding(cell: LoadedCell, metric: Metric) -> Rounding | None:
    assert metric.of_run is not None
    exact_values, hta_values = [], []
    for run in cell.completed_runs:
        if not run.traces.like_hta:
            continue
        alternatives = (run.traces.exact, run.traces.like_hta)
        exact_value, hta_value = (metric.of_run(run.with_breakdowns(breakdowns)) for breakdowns in alternatives)
        if exact_value and hta_value:
            exact_values.append(exact_value.value)
            hta_values.append(hta_value.value)
    if not exact_values:
        return None
    exact_mean, hta_mean = statistics.fmean(exact_values), statistics.fmean(hta_values)
    return Rounding(cell.id, metric.name, metric.unit, len(exact_values), exact_mean, hta_mean, hta_mean - exact_mean)


def _list_profiled_breakdowns(cell: LoadedCell) -> list[list[Breakdown]]:
    """For each run of a cell that was profiled by steps, the exact breakdowns of its traces.

    HTA's breakdowns are not used, because HTA counts some kernels more than once. Empty if the runs have breakdowns of
    different kinds, which have no common mean.
    """
    runs = [breakdowns for run in cell.completed_runs if (breakdowns := [rank for rank in run.traces.exact if rank.steps])]
    return runs if len(_collect_breakdown_kinds(runs)) == 1 else []


def _collect_breakdown_kinds(breakdowns_of_runs: Sequence[Sequence[Breakdown]]) -> set[str]:
    return {breakdown.kind for run in breakdowns_of_runs for breakdown in run}


def _diff_uses(
    cell_uses: Mapping[str, OperatorUse], baseline_uses: Mapping[str, OperatorUse], kind: str
) -> Iterator[OperatorDifference]:
    for name in cell_uses.keys() | baseline_uses.keys():
        use, baseline_use = cell_uses.get(name, OperatorUse(0, 0)), baseline_uses.get(name, OperatorUse(0, 0))
        yield OperatorDifference(
            name=name,
            kind=kind,
            change=_classify_change(use.calls, baseline_use.calls),
            calls=use.calls,
            against_calls=baseline_use.calls,
            time_ns=use.total_ms * 1e6,
            against_time_ns=baseline_use.total_ms * 1e6,
        )


def _classify_change(calls: float, baseline_calls: float) -> OperatorChange:
    if not calls or not baseline_calls:
        return "new" if calls else "gone"
    return "same" if math.isclose(calls, baseline_calls, rel_tol=1e-9) else "changed"


def _make_sort_key(difference: OperatorDifference) -> tuple[float, str]:
    return -abs(difference.time_difference_ns), difference.name


def _make_operator_tables(comparisons: Sequence[OperatorDifferences], label_by_cell: Mapping[str, str]) -> list[Table[Any]]:
    return [
        Table(
            f"{label_by_cell[comparison.cell]} compared with {label_by_cell[comparison.baseline]}",
            make_operator_columns("of the baseline"),
            comparison.differences,
            note=f"{comparison.of}: {', '.join(f'{count} {change}' for change, count in comparison.changes.items())}",
            most_rows=MOST_ROWS,
        )
        for comparison in comparisons
    ]


# The parts of the page of a report, by the name of the list of the summary that they show.
SECTIONS = {
    "collectives": AnswerSection(
        "Collectives of a step",
        "Exact values; mean over profiled ranks and repeats. Times are sums of durations, including the wait for other ranks.",
        make_single_table_maker(
            Column("Collective", lambda use: use.collective),
            Column("Calls", lambda use: use.calls),
            Column("Total", lambda use: use.total_ms, "ms"),
            Column("Mean of a call", lambda use: use.mean_ms, "ms"),
            REPEATS_COLUMN,
        ),
    ),
    "operators": AnswerSection(
        "Operators compared with the baseline",
        "Exact values per step; mean over profiled ranks and repeats. An operator includes all that it calls. The "
        "names whose time differs most come first.",
        _make_operator_tables,
        is_folded=True,
    ),
    "rounding": AnswerSection(
        "Effect of rounding",
        "The study's tool, HolisticTraceAnalysis (HTA), rounds to whole microseconds and leaves out the last profiler "
        "step. Verdicts on traces use the values as HTA computes them; this table shows how far these are from the "
        "exact values.",
        make_single_table_maker(
            make_name_column("Metric", lambda rounding: rounding.metric),
            Column("Exact", lambda rounding: rounding.exact),
            Column("Like HTA", lambda rounding: rounding.like_hta),
            Column("Difference", lambda rounding: rounding.difference, digits=2, is_signed=True),
            Column("Unit", lambda rounding: rounding.unit, is_number=False),
            REPEATS_COLUMN,
        ),
    ),
}
