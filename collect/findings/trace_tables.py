"""Makes tables of profiled cells: their collectives, their operators compared with the baseline, and the effect of rounding.

HolisticTraceAnalysis (HTA) rounds the times in traces, while the metrics of shardlab are exact by default.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from collect.findings.row import CellRow
from collect.metric import Metric, menu
from collect.reading.load import Loaded, LoadedCell
from collect.traces import per_step
from collect.traces.breakdown import Breakdown
from collect.traces.operators import Change, OperatorDifference
from collect.traces.per_step import Use

ROUNDED = ("idle_pct", "overlap_pct", "exposed_communication_ms")  # the metrics on which rounding has the largest effect


class Rounding(msgspec.Struct, frozen=True):
    """A trace metric of a cell, exact and as HolisticTraceAnalysis (HTA) rounds it, as means over n repeats."""

    cell: str
    metric: str
    unit: str
    n: int  # number of repeats
    exact: float  # the exact value
    like_hta: float  # the value as HTA rounds it
    difference: float  # like_hta - exact


class Collective(msgspec.Struct, frozen=True):
    """A collective in a profiled step of a cell, as means over profiled ranks and n repeats.

    Durations include waiting for other ranks.
    """

    cell: str
    collective: str
    n: int  # number of repeats
    calls: float  # calls per step
    total_ms: float  # sum of the durations per step
    mean_ms: float  # duration of a call


class OperatorDifferences(msgspec.Struct, frozen=True):
    """The kernels or operators of a cell compared with its baseline, as means over profiled ranks and repeats."""

    cell: str
    baseline: str
    of: str  # `kernels`, or `operators` on a CPU
    changes: dict[str, int]  # kind of change (new, gone, changed, same) -> number of names with this change
    differences: list[OperatorDifference]  # the largest difference in time first


def roundings(loaded: Loaded) -> list[Rounding]:
    """The effect of HTA's rounding on metrics, for the cells whose traces are also evaluated as HTA evaluates them."""
    metrics = {metric.name: metric for metric in menu()}
    return [found for cell in loaded.cells for name in ROUNDED if (found := _rounding(cell, metrics[name]))]


def without_kernels(loaded: Loaded) -> tuple[list[str], int]:
    """(ids of the runs whose trace metrics are exact although the matrix asks for the metrics of HTA, number of all profiled
    runs).

    HTA cannot evaluate the runs in this list, because it finds no GPU kernels in one of their traces.
    """
    profiled = [run for cell in loaded.cells for run in cell.completed if run.breakdowns]
    asked = loaded.expansion.traces == "like-hta"
    return [run.run_id for run in profiled if asked and not run.traces.like_hta], len(profiled)


def collectives(loaded: Loaded) -> list[Collective]:
    """The collectives of every cell that was profiled by steps. The collectives of a cell are ordered by time, the longest
    first."""
    found = []
    for cell in loaded.cells:
        runs = _profiled(cell)
        uses = per_step.uses(runs, lambda one: one.collectives)
        for name, use in sorted(uses.items(), key=lambda item: (-item[1].ms, item[0])):
            found.append(Collective(cell.id, name, len(runs), use.calls, use.ms, use.ms / use.calls))
    return found


def operators(loaded: Loaded, rows: Sequence[CellRow]) -> list[OperatorDifferences]:
    """Compare the kernels or operators of every cell with those of its baseline, if both were profiled in the same way.

    Kernels are not compared with operators.
    """
    cells = {cell.id: cell for cell in loaded.cells}
    found = []
    for row in rows:
        if row.baseline is None or row.baseline == row.id:
            continue
        here, there = (_profiled(cells[name]) for name in (row.id, row.baseline))
        if _kinds(here) != _kinds(there) or not here:
            continue
        uses, others = (per_step.uses(runs, lambda one: one.kernels) for runs in (here, there))
        of = "kernels" if here[0][0].source == "gpu" else "operators"
        differ = sorted(_differences(uses, others, "kernel" if of == "kernels" else "cpu_op"), key=_most_first)
        changes = {change: sum(one.change == change for one in differ) for change in ("new", "gone", "changed", "same")}
        found.append(OperatorDifferences(row.id, row.baseline, of, changes, differ))
    return found


def _rounding(cell: LoadedCell, metric: Metric) -> Rounding | None:
    assert metric.of_run is not None
    exact, like_hta = [], []
    for run in cell.completed:
        if not run.traces.like_hta:
            continue
        ways = (run.traces.exact, run.traces.like_hta)
        ours, theirs = (metric.of_run(run.with_breakdowns(breakdowns)) for breakdowns in ways)
        if ours and theirs:
            exact.append(ours.value)
            like_hta.append(theirs.value)
    if not exact:
        return None
    exact_mean, hta_mean = statistics.fmean(exact), statistics.fmean(like_hta)
    return Rounding(cell.id, metric.name, metric.unit, len(exact), exact_mean, hta_mean, hta_mean - exact_mean)


def _profiled(cell: LoadedCell) -> list[list[Breakdown]]:
    """For each run of a cell that was profiled by steps, the exact breakdowns of its traces.

    HTA's breakdowns are not used, because HTA counts some kernels more than once. Empty if the runs have breakdowns of
    different kinds, which have no common mean.
    """
    runs = [known for run in cell.completed if (known := [one for one in run.traces.exact if one.steps])]
    return runs if len(_kinds(runs)) == 1 else []


def _kinds(runs: Sequence[Sequence[Breakdown]]) -> set[str]:
    return {one.kind for run in runs for one in run}


def _differences(here: Mapping[str, Use], there: Mapping[str, Use], kind: str) -> Iterator[OperatorDifference]:
    for name in here.keys() | there.keys():
        one, other = here.get(name, Use(0, 0)), there.get(name, Use(0, 0))
        yield OperatorDifference(
            name=name,
            kind=kind,
            change=_change(one.calls, other.calls),
            calls=one.calls,
            against_calls=other.calls,
            time_ns=one.ms * 1e6,
            against_time_ns=other.ms * 1e6,
        )


def _change(calls: float, other: float) -> Change:
    if not calls or not other:
        return "new" if calls else "gone"
    return "same" if math.isclose(calls, other, rel_tol=1e-9) else "changed"


def _most_first(one: OperatorDifference) -> tuple[float, str]:
    return -abs(one.more_time_ns), one.name
