"""Tables of profiled cells: their collectives, their operators compared with the baseline, and the effect of HTA's rounding."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from collect.findings.row import CellRow
from collect.loading.load import Loaded, LoadedCell
from collect.metric import Metric, menu
from collect.traces import per_step
from collect.traces.breakdown import Breakdown
from collect.traces.operators import Change, OperatorDifference
from collect.traces.per_step import Use

ROUNDED = ("idle_pct", "overlap_pct", "exposed_communication_ms")  # where rounding shows most


class Rounding(msgspec.Struct, frozen=True):
    """A trace metric of a cell, exact and as HolisticTraceAnalysis rounds it; means over n repeats."""

    cell: str
    metric: str
    unit: str
    n: int
    exact: float
    like_hta: float
    difference: float  # like_hta - exact


class Collective(msgspec.Struct, frozen=True):
    """Calls of a collective in a profiled step of a cell and what they last added up, waiting for other ranks included; means
    over profiled ranks and n repeats. mean_ms: of a call."""

    cell: str
    collective: str
    n: int
    calls: float
    total_ms: float
    mean_ms: float


class OperatorDifferences(msgspec.Struct, frozen=True):
    """The calls of a cell compared with its baseline, largest difference in time first. of: `kernels`, or `operators` on CPU.

    changes: how many are new, gone, changed, same. Means over profiled ranks and repeats.
    """

    cell: str
    baseline: str
    of: str
    changes: dict[str, int]
    differences: list[OperatorDifference]


def roundings(loaded: Loaded) -> list[Rounding]:
    """Of the cells whose figures are like HTA's."""
    metrics = {metric.name: metric for metric in menu()}
    return [found for cell in loaded.cells for name in ROUNDED if (found := _rounding(cell, metrics[name]))]


def without_kernels(loaded: Loaded) -> tuple[list[str], int]:
    """(the runs whose figures are exact although the matrix asks for HTA's, how many runs were profiled)."""
    profiled = [run for cell in loaded.cells for run in cell.completed if run.breakdowns]
    asked = loaded.expansion.traces == "like-hta"
    return [run.run_id for run in profiled if asked and not run.traces.like_hta], len(profiled)


def collectives(loaded: Loaded) -> list[Collective]:
    """Of every cell that was profiled by steps, that which takes longest first."""
    found = []
    for cell in loaded.cells:
        runs = _profiled(cell)
        uses = per_step.uses(runs, lambda one: one.collectives)
        for name, use in sorted(uses.items(), key=lambda item: (-item[1].ms, item[0])):
            found.append(Collective(cell.id, name, len(runs), use.calls, use.ms, use.ms / use.calls))
    return found


def operators(loaded: Loaded, rows: Sequence[CellRow]) -> list[OperatorDifferences]:
    """Of every cell that was profiled as its baseline was; kernels do not compare with operators."""
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
    """The exact breakdowns by steps of each run (HTA counts some kernels more than once). Empty if the runs have figures of
    different kinds, which have no common mean."""
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
