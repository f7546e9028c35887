"""Distinguishes waiting for slow ranks from transfer, by matching the calls of collectives on different ranks with each other.

If every rank of a collective needs data from every other rank, the collective cannot finish before the last rank has started.
So on each rank the call first waits until the last rank starts, and then transfers. The rank that starts last does not wait,
and its call is the shortest. So the time of the transfer is the shortest duration of the call over the ranks, and the rest of
the duration on each rank is waiting. TraceLens (NcclAnalyser: comm_latency) computes the transfer in the same way, but computes
the waiting as the latest start minus the start on the rank. So TraceLens needs clocks that differ by less than the waiting.
Both methods give the same result if all ranks finish together.

Calls are matched by process group, profiler step and order. If the ranks of a group called different collectives in a step, or
the same collective with different sizes, then none of the group's calls in this step is matched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from collect.traces.calls import CollectiveCall, ProcessGroup
from collect.traces.rank_analysis import RankAnalysis

# Collectives that no rank can finish before the last rank has started. In other collectives a rank may finish earlier, such as
# the root of a broadcast.
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
_ANY_SIZE = frozenset({"all_to_all"})  # collectives in which ranks may send messages of different sizes
CallPosition = tuple[int, int]  # (index of a rank in the list of analyses, index of a call in the list of calls of this rank)


class RankWait(msgspec.Struct, frozen=True, kw_only=True):
    """How long a rank waited for other ranks, and the other ranks for this rank, in the matched calls of all profiled steps.

    Times are in ns.
    """

    rank: int
    calls: int
    """The number of matched calls."""
    last: int
    """The number of calls that this rank started last, later than all others."""
    waited_ns: int
    """The time that the rank waited in collectives."""
    lost_ns: int
    """The part of waited_ns in which nothing computes, so that the step gets longer."""
    span_ns: int
    """The profiled time of the rank, as in the breakdown."""
    caused_ns: int
    """The time that all other ranks waited in the calls that this rank started last."""

    @property
    def lost_pct(self) -> float | None:
        """The share of the rank's profiled time in which it waits for other ranks and nothing computes, in percent."""
        return 100 * self.lost_ns / self.span_ns if self.span_ns else None


class RankWaits(NamedTuple):
    """How long ranks waited for each other, in the calls of a run that were matched over ranks."""

    waited: dict[CallPosition, int]
    """For each matched call, the time that its rank waited in the call, in ns."""
    skew_ns: list[int]
    """For each matched collective, the longest waiting time of any rank, in ns; sorted."""
    ranks: list[RankWait]
    """The waiting of each rank, sorted by rank; empty if no call could be matched."""
    unmatched: int
    """The number of calls, of all ranks together, that synchronize ranks but could not be matched."""
    why: str
    """The reason why no call could be matched; "" if calls were matched."""

    @property
    def lost_pct(self) -> float | None:
        """The share of the profiled time of all ranks that is lost to waiting, in percent; None if no call could be matched."""
        span = sum(rank_wait.span_ns for rank_wait in self.ranks)
        return 100 * sum(rank_wait.lost_ns for rank_wait in self.ranks) / span if span else None

    @property
    def straggler(self) -> RankWait | None:
        """The rank that the other ranks waited for the longest; None if the ranks never waited for a single rank."""
        slowest = max(self.ranks, key=lambda rank_wait: (rank_wait.caused_ns, -rank_wait.rank), default=None)
        return slowest if slowest and slowest.caused_ns else None


def compute_waits(ranks: Sequence[RankAnalysis]) -> RankWaits:
    """Match the calls of all ranks, and compute how long ranks waited. The order of `ranks` does not change any result."""
    numbers = [rank_analysis.rank for rank_analysis in ranks]
    if len(ranks) < 2:
        return _no_waits("only one rank was profiled")
    if None in numbers or len(set(numbers)) < len(numbers):
        return _no_waits("the traces do not say which rank each of them is of, or several are of one rank")
    sequences: defaultdict[tuple[ProcessGroup, int], dict[int, list[int]]] = defaultdict(dict)
    for rank, analysis in enumerate(ranks):
        for index, call in enumerate(analysis.calls):
            group = analysis.groups[call.group]
            if call.name in SYNCHRONIZING and not group.mixed:
                key = group, call.step
                sequences[key].setdefault(rank, []).append(index)
    waited_ns: dict[CallPosition, int] = {}
    skew: list[int] = []
    last: Counter[int] = Counter()
    caused_ns: Counter[int] = Counter()
    unmatched = 0
    for (group, _), by_rank in sequences.items():
        if not _calls_match(ranks, group, by_rank):
            unmatched += sum(map(len, by_rank.values()))
            continue
        rank_indexes = list(by_rank)
        for matched_calls in zip(*by_rank.values(), strict=True):
            durations = [ranks[rank].calls[index].duration_ns for rank, index in zip(rank_indexes, matched_calls, strict=True)]
            shortest = min(durations)
            waiting_ns = [duration - shortest for duration in durations]
            for rank, index, ns in zip(rank_indexes, matched_calls, waiting_ns, strict=True):
                waited_ns[rank, index] = ns
            skew.append(max(waiting_ns))
            latest = [rank for rank, ns in zip(rank_indexes, waiting_ns, strict=True) if not ns]
            if len(latest) == 1:
                last[latest[0]] += 1
                caused_ns[latest[0]] += sum(waiting_ns)
    if not waited_ns:
        return _no_waits(
            "the ranks called no collective that all of them wait in"
            if not sequences
            else "the calls of the ranks do not agree in process group, step and order",
            unmatched,
        )
    return RankWaits(waited_ns, sorted(skew), _sum_by_rank(ranks, waited_ns, last, caused_ns), unmatched, "")


def _no_waits(why: str, unmatched: int = 0) -> RankWaits:
    return RankWaits({}, [], [], unmatched, why)


def _calls_match(ranks: Sequence[RankAnalysis], group: ProcessGroup, by_rank: dict[int, list[int]]) -> bool:
    """Whether several ranks of the process group made calls, and all of these ranks made the same calls in the same order."""
    if len(by_rank) < 2 or (group.size is not None and len(by_rank) > group.size):
        return False
    sequences = [[_call_signature(ranks[rank_index].calls[index]) for index in calls] for rank_index, calls in by_rank.items()]
    return all(sequence == sequences[0] for sequence in sequences)


def _call_signature(call: CollectiveCall) -> tuple[str, int | None]:
    return call.name, None if call.name in _ANY_SIZE else call.message_bytes


def _sum_by_rank(
    ranks: Sequence[RankAnalysis], waited: dict[CallPosition, int], last: Counter[int], caused_ns: Counter[int]
) -> list[RankWait]:
    calls: Counter[int] = Counter()
    waited_ns: Counter[int] = Counter()
    lost_ns: Counter[int] = Counter()
    for (rank_index, index), ns in waited.items():
        calls[rank_index] += 1
        waited_ns[rank_index] += ns
        lost_ns[rank_index] += ranks[rank_index].calls[index].exposed_within(ns)
    rank_waits = [
        RankWait(
            rank=analysis.rank,
            calls=calls[rank_index],
            last=last[rank_index],
            waited_ns=waited_ns[rank_index],
            lost_ns=lost_ns[rank_index],
            span_ns=analysis.span_ns,
            caused_ns=caused_ns[rank_index],
        )
        for rank_index, analysis in enumerate(ranks)
        if analysis.rank is not None
    ]
    return sorted(rank_waits, key=lambda rank_wait: rank_wait.rank)
