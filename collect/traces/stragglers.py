"""Waiting for slow ranks, told from transfer: matches the calls of collectives over ranks.

A collective that every rank needs data of every other rank for cannot finish before the last rank has started it. So its
duration on a rank is waiting, until the last rank starts, and then transfer. The rank that starts last does not wait, and its
call is the shortest: transfer is the shortest duration of a call over the ranks, and the rest of each rank's duration is
waiting. TraceLens (NcclAnalyser: comm_latency) takes transfer in the same way, but takes waiting as the latest start minus the
start on the rank, which needs hosts whose clocks agree to less than the waiting. Both are equal if all ranks finish together.

Calls are matched by process group, profiler step and order. If the ranks of a group called other collectives in a step, or
other sizes, then none of these calls is matched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from collect.traces.calls import CollectiveCall, ProcessGroup
from collect.traces.rank_analysis import RankAnalysis

# No rank can finish these before the last one has started. The root of a broadcast and a sender may finish earlier.
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
_ANY_SIZE = frozenset({"all_to_all"})  # ranks may send different sizes
Place = tuple[int, int]  # of a rank in the list of analyses, of a call in its list


class RankWait(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank waited for others, and others for it, in the matched calls of all profiled steps. Times in ns.

    last: calls that this rank started last; of a call that all ranks started together there is no last rank. waited_ns: the
    rank's waiting in collectives. lost_ns: that of it in which nothing computes, so that the step gets longer. span_ns: as in
    the breakdown. caused_ns: what all other ranks waited in the calls that this rank started last.
    """

    rank: int
    calls: int
    last: int
    waited_ns: int
    lost_ns: int
    span_ns: int
    caused_ns: int

    @property
    def lost_pct(self) -> float | None:
        """The share of the rank's profiled time that is lost to waiting, in percent."""
        return 100 * self.lost_ns / self.span_ns if self.span_ns else None


class Waits(NamedTuple):
    """The matched calls of a run.

    waited: for each matched call, as (place of the rank, place of the call), its waiting in ns. skew_ns: of each matched
    collective the longest waiting of a rank. ranks: by rank; empty if nothing could be matched, and `why` says why.
    unmatched: calls that synchronize ranks and could not be matched, of all ranks together.
    """

    waited: dict[Place, int]
    skew_ns: list[int]
    ranks: list[RankWait]
    unmatched: int
    why: str

    @property
    def lost_pct(self) -> float | None:
        """The share of the profiled time of all ranks that is lost to waiting, in percent; None if nothing could be matched."""
        span = sum(one.span_ns for one in self.ranks)
        return 100 * sum(one.lost_ns for one in self.ranks) / span if span else None

    @property
    def straggler(self) -> RankWait | None:
        """The rank that others waited for the longest; None if no rank waited."""
        slowest = max(self.ranks, key=lambda one: (one.caused_ns, -one.rank), default=None)
        return slowest if slowest and slowest.caused_ns else None


def waits(ranks: Sequence[RankAnalysis]) -> Waits:
    """Match the calls of all ranks. The order of the ranks does not matter for any figure."""
    numbers = [one.rank for one in ranks]
    if len(ranks) < 2:
        return _nothing("only one rank was profiled")
    if None in numbers or len(set(numbers)) < len(numbers):
        return _nothing("the traces do not say which rank each of them is of, or several are of one rank")
    sequences: defaultdict[tuple[ProcessGroup, int], dict[int, list[int]]] = defaultdict(dict)
    for place, analysis in enumerate(ranks):
        for index, call in enumerate(analysis.calls):
            group = analysis.groups[call.group]
            if call.name in SYNCHRONIZING and not group.mixed:
                key = group, call.step
                sequences[key].setdefault(place, []).append(index)
    waited: dict[Place, int] = {}
    skew: list[int] = []
    last: Counter[int] = Counter()
    caused: Counter[int] = Counter()
    unmatched = 0
    for (group, _), by_rank in sequences.items():
        if not _alike(ranks, group, by_rank):
            unmatched += sum(map(len, by_rank.values()))
            continue
        places = list(by_rank)
        for together in zip(*by_rank.values(), strict=True):
            durations = [ranks[place].calls[index].duration_ns for place, index in zip(places, together, strict=True)]
            shortest = min(durations)
            waiting = [duration - shortest for duration in durations]
            for place, index, ns in zip(places, together, waiting, strict=True):
                waited[place, index] = ns
            skew.append(max(waiting))
            latest = [place for place, ns in zip(places, waiting, strict=True) if not ns]
            if len(latest) == 1:
                last[latest[0]] += 1
                caused[latest[0]] += sum(waiting)
    if not waited:
        return _nothing(
            "the ranks called no collective that all of them wait in"
            if not sequences
            else "the calls of the ranks do not agree in process group, step and order",
            unmatched,
        )
    return Waits(waited, sorted(skew), _by_rank(ranks, waited, last, caused), unmatched, "")


def _nothing(why: str, unmatched: int = 0) -> Waits:
    return Waits({}, [], [], unmatched, why)


def _alike(ranks: Sequence[RankAnalysis], group: ProcessGroup, by_rank: dict[int, list[int]]) -> bool:
    """Whether these calls are of one process group and are the same on all its ranks."""
    if len(by_rank) < 2 or (group.size is not None and len(by_rank) > group.size):
        return False
    sequences = [[_what(ranks[place].calls[index]) for index in calls] for place, calls in by_rank.items()]
    return all(sequence == sequences[0] for sequence in sequences)


def _what(call: CollectiveCall) -> tuple[str, int | None]:
    return call.name, None if call.name in _ANY_SIZE else call.message_bytes


def _by_rank(
    ranks: Sequence[RankAnalysis], waited: dict[Place, int], last: Counter[int], caused: Counter[int]
) -> list[RankWait]:
    calls: Counter[int] = Counter()
    total: Counter[int] = Counter()
    lost: Counter[int] = Counter()
    for (place, index), ns in waited.items():
        calls[place] += 1
        total[place] += ns
        lost[place] += ranks[place].calls[index].exposed_within(ns)
    found = [
        RankWait(
            rank=analysis.rank,
            calls=calls[place],
            last=last[place],
            waited_ns=total[place],
            lost_ns=lost[place],
            span_ns=analysis.span_ns,
            caused_ns=caused[place],
        )
        for place, analysis in enumerate(ranks)
        if analysis.rank is not None
    ]
    return sorted(found, key=lambda one: one.rank)
