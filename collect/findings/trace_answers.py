"""Makes tables that explain the time of a step of profiled cells: by process group, by slow rank, and against the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from collect.findings.row import CellRow
from collect.reading.load import Loaded, LoadedCell
from collect.traces.collectives import CollectiveUse
from collect.traces.difference import StepDifference, difference
from collect.traces.run_answers import RunAnswers
from collect.traces.stragglers import RankWait


class GroupTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of one process group in a profiled step of a cell, over all profiled ranks and n repeats.

    A value is None if the trace does not record it, or if too few ranks were profiled.
    """

    cell: str
    collective: str
    group: str  # the name of the process group, or its ranks
    n: int  # number of repeats
    calls: float  # calls of a rank in a step
    message_bytes: float | None  # size of the message of a call
    sent_bytes: float | None  # what a rank sends for the collective in a step, by the ring algorithm
    mean_us: float  # duration of a call
    transfer_us: float | None  # duration of a call without waiting for slow ranks
    hidden_pct: float | None  # share of the duration during which something computes
    algorithm_gb_per_s: float | None  # algorithm bandwidth as nccl-tests defines it, in 1e9 bytes/s
    bus_gb_per_s: float | None  # bus bandwidth as nccl-tests defines it, in 1e9 bytes/s
    link: str | None  # the link between the GPUs of a host
    link_gb_per_s: float | None  # bandwidth of the link in one direction by its data sheet, in 1e9 bytes/s


class RankWaiting(msgspec.Struct, frozen=True, kw_only=True):
    """How long a rank of a cell waits for slow ranks in a profiled step, as the mean over n repeats. Times are per step."""

    cell: str
    rank: int
    n: int  # number of repeats
    last_pct: float  # share of the matched collectives that this rank started last
    waited_ms: float  # waiting in collectives
    lost_ms: float  # waiting in collectives while nothing computes
    lost_pct: float | None  # lost_ms as a share of the profiled time
    caused_ms: float  # waiting of all other ranks together, in the collectives that this rank started last


class CellDifference(msgspec.Struct, frozen=True):
    """Why a step of a cell takes longer or shorter than a step of its baseline, as means over profiled ranks and repeats."""

    cell: str
    baseline: str
    step: StepDifference  # the difference, in parts


def group_traffic(loaded: Loaded) -> list[GroupTraffic]:
    """The collectives of every cell that was profiled by steps. The collectives of a cell are ordered by time, the longest
    first."""
    return [found for cell in loaded.cells for found in of_cell(cell)]


def of_cell(cell: LoadedCell) -> list[GroupTraffic]:
    """The collectives of a cell by process group, ordered by their time, the longest first."""
    runs = profiled(cell)
    steps = sum(one.steps for run in runs for one in run.ranks)
    uses: dict[tuple[str, str], list[tuple[CollectiveUse, int]]] = {}
    for repeat, run in enumerate(runs):
        for use in run.collectives:
            uses.setdefault((use.collective, use.group.label), []).append((use, repeat))
    longest_first = sorted(uses.items(), key=lambda item: (-sum(use.total_ns for use, _ in item[1]), item[0]))
    return [
        _traffic(cell.id, name, group, [use for use, _ in every], len({repeat for _, repeat in every}), steps)
        for (name, group), every in longest_first
    ]


def _traffic(cell: str, name: str, group: str, uses: Sequence[CollectiveUse], n: int, steps: int) -> GroupTraffic:
    calls = sum(use.calls for use in uses)
    total, timed = sum(use.total_ns for use in uses), sum(use.timed_ns for use in uses)
    size, bus, sent = (_sum([getattr(use, field) for use in uses]) for field in ("message_bytes", "bus_bytes", "sent_bytes"))
    transfer = _sum([use.transfer_ns for use in uses])
    links = {(use.link, use.link_gb_per_s) for use in uses}
    link, link_gb_per_s = links.pop() if len(links) == 1 else (None, None)
    return GroupTraffic(
        cell=cell,
        collective=name,
        group=group,
        n=n,
        calls=calls / steps,
        message_bytes=None if size is None else size / calls,
        sent_bytes=None if sent is None else sent / steps,
        mean_us=total / calls / 1000,
        transfer_us=None if transfer is None else transfer / calls / 1000,
        hidden_pct=100 * sum(use.hidden_ns for use in uses) / total if total else None,
        algorithm_gb_per_s=None if size is None or not timed else size / timed,
        bus_gb_per_s=None if bus is None or not timed else bus / timed,
        link=link,
        link_gb_per_s=link_gb_per_s,
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def rank_waiting(loaded: Loaded) -> list[RankWaiting]:
    """The waiting of each rank, for every cell that was profiled by steps and whose collectives were matched over ranks."""
    found = []
    for cell in loaded.cells:
        by_rank: dict[int, list[tuple[RankWait, int]]] = {}
        for run in profiled(cell):
            steps = {one.rank: one.steps for one in run.ranks}
            for wait in run.waits.ranks:
                by_rank.setdefault(wait.rank, []).append((wait, steps[wait.rank]))
        found += [_waiting(cell.id, rank, every) for rank, every in sorted(by_rank.items())]
    return found


def _waiting(cell: str, rank: int, every: Sequence[tuple[RankWait, int]]) -> RankWaiting:
    calls, span = sum(wait.calls for wait, _ in every), sum(wait.span_ns for wait, _ in every)
    return RankWaiting(
        cell=cell,
        rank=rank,
        n=len(every),
        last_pct=100 * sum(wait.last for wait, _ in every) / calls if calls else 0,
        waited_ms=statistics.fmean(wait.waited_ns / steps / 1e6 for wait, steps in every),
        lost_ms=statistics.fmean(wait.lost_ns / steps / 1e6 for wait, steps in every),
        lost_pct=100 * sum(wait.lost_ns for wait, _ in every) / span if span else None,
        caused_ms=statistics.fmean(wait.caused_ns / steps / 1e6 for wait, steps in every),
    )


def step_differences(loaded: Loaded, rows: Sequence[CellRow]) -> list[CellDifference]:
    """The difference from the baseline, for every cell that was profiled by steps on the same kind of hardware as its baseline.

    GPUs are not compared with CPUs.
    """
    cells = {cell.id: cell for cell in loaded.cells}
    found = []
    for row in rows:
        if row.baseline is None or row.baseline == row.id:
            continue
        step = of_cells(cells[row.id], cells[row.baseline])
        if step is not None:
            found.append(CellDifference(row.id, row.baseline, step))
    return found


def of_cells(cell: LoadedCell, baseline: LoadedCell) -> StepDifference | None:
    """The difference between a step of a cell and a step of its baseline.

    None if one of the two cells was not profiled by steps, or if they were profiled on different kinds of hardware.
    """
    return difference(profiled(cell), profiled(baseline))


def profiled(cell: LoadedCell) -> list[RunAnswers]:
    """What the traces of each completed run of a cell show. Runs are left out if a profiled rank was not profiled by steps."""
    answers = [run.traces.answers for run in cell.completed if run.traces.analyses]
    return [one for one in answers if all(rank.steps for rank in one.ranks)]
