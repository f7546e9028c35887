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
SYNCHRONIZING_COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
_UNEQUAL_COLLECTIVES = frozenset({"all_to_all"})  # collectives in which ranks may send messages of different sizes
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

    waited_ns: dict[CallPosition, int]
    """For each matched call, the time that its rank waited in the call, in ns."""
    skew_ns: list[int]
    """For each matched collective, the longest waiting time of any rank, in ns; sorted."""
    ranks: list[RankWait]
    """The waiting of each rank, sorted by rank; empty if no call could be matched."""
    unmatched_count: int
    """The number of calls, of all ranks together, that synchronize ranks but could not be matched."""
    is_partial: bool
    """Whether ranks of the groups of matched calls were not profiled, so that the waiting is a lower bound."""
    missing_reason: str
    """The reason why no call could be matched; "" if calls were matched."""

    @property
    def lost_pct(self) -> float | None:
        """The share of the profiled time of all ranks that is lost to waiting, in percent; None if no call could be matched."""
        total_span_ns = sum(rank_wait.span_ns for rank_wait in self.ranks)
        return 100 * sum(rank_wait.lost_ns for rank_wait in self.ranks) / total_span_ns if total_span_ns else None

    @property
    def straggler(self) -> RankWait | None:
        """The rank that the other ranks waited for the longest; None if the ranks never waited for a single rank."""
        slowest = max(self.ranks, key=lambda rank_wait: (rank_wait.caused_ns, -rank_wait.rank), default=None)
        return slowest if slowest and slowest.caused_ns else None


def compute_waits(ranks: Sequence[RankAnalysis]) -> RankWaits:
    """Match the calls of all ranks, and compute how long ranks waited. The order of `ranks` does not change any result."""
    rank_numbers = [rank_analysis.rank for rank_analysis in ranks]
    if len(ranks) < 2:
        return _build_empty_waits("only one rank was profiled")
    # several files may be of one rank, if they are of different steps
    ranks_and_steps = [
        (analysis.rank, step) for analysis in ranks for step in dict.fromkeys(call.step for call in analysis.calls)
    ]
    if None in rank_numbers or len(set(ranks_and_steps)) < len(ranks_and_steps):
        return _build_empty_waits("the traces do not say which rank each of them is of, or several are of one rank and step")
    calls_by_group_and_step: defaultdict[tuple[ProcessGroup, int], dict[int, list[int]]] = defaultdict(dict)
    for rank, analysis in enumerate(ranks):
        for call_index, call in enumerate(analysis.calls):
            process_group = analysis.groups[call.group]
            if call.name in SYNCHRONIZING_COLLECTIVES and not process_group.mixed:
                group_and_step = process_group, call.step
                calls_by_group_and_step[group_and_step].setdefault(rank, []).append(call_index)
    waited_ns_by_call: dict[CallPosition, int] = {}
    skews_ns: list[int] = []
    last_count_by_rank: Counter[int] = Counter()
    caused_ns_by_rank: Counter[int] = Counter()
    unmatched_count = 0
    is_partial = False
    for (process_group, _), calls_by_rank in calls_by_group_and_step.items():
        if not _have_matching_calls(ranks, process_group, calls_by_rank):
            unmatched_count += sum(map(len, calls_by_rank.values()))
            continue
        rank_indexes = list(calls_by_rank)
        is_partial |= process_group.size is not None and len(calls_by_rank) < process_group.size
        for matched_calls in zip(*calls_by_rank.values(), strict=True):
            durations_ns = [
                ranks[rank].calls[call_index].duration_ns for rank, call_index in zip(rank_indexes, matched_calls, strict=True)
            ]
            shortest_ns = min(durations_ns)
            waiting_ns = [duration_ns - shortest_ns for duration_ns in durations_ns]
            for rank, call_index, call_wait_ns in zip(rank_indexes, matched_calls, waiting_ns, strict=True):
                waited_ns_by_call[rank, call_index] = call_wait_ns
            skews_ns.append(max(waiting_ns))
            latest_ranks = [rank for rank, call_wait_ns in zip(rank_indexes, waiting_ns, strict=True) if not call_wait_ns]
            if len(latest_ranks) == 1:
                last_count_by_rank[latest_ranks[0]] += 1
                caused_ns_by_rank[latest_ranks[0]] += sum(waiting_ns)
    if not waited_ns_by_call:
        return _build_empty_waits(
            "the ranks called no collective that all of them wait in"
            if not calls_by_group_and_step
            else "the calls of the ranks do not agree in process group, step and order",
            unmatched_count,
        )
    return RankWaits(
        waited_ns_by_call,
        sorted(skews_ns),
        _sum_waits_by_rank(ranks, waited_ns_by_call, last_count_by_rank, caused_ns_by_rank),
        unmatched_count,
        is_partial,
        "",
    )


def _build_empty_waits(missing_reason: str, unmatched_count: int = 0) -> RankWaits:
    return RankWaits({}, [], [], unmatched_count, False, missing_reason)


def _have_matching_calls(ranks: Sequence[RankAnalysis], group: ProcessGroup, calls_by_rank: dict[int, list[int]]) -> bool:
    """Whether several ranks of the process group made calls, and all of these ranks made the same calls in the same order."""
    if len(calls_by_rank) < 2 or (group.size is not None and len(calls_by_rank) > group.size):
        return False
    signatures = [
        [_make_call_signature(ranks[rank_index].calls[index]) for index in calls] for rank_index, calls in calls_by_rank.items()
    ]
    return all(signature_sequence == signatures[0] for signature_sequence in signatures)


def _make_call_signature(call: CollectiveCall) -> tuple[str, int | None]:
    return call.name, None if call.name in _UNEQUAL_COLLECTIVES else call.message_bytes


def _sum_waits_by_rank(
    ranks: Sequence[RankAnalysis], waiting_ns: dict[CallPosition, int], last_counts: Counter[int], caused_ns: Counter[int]
) -> list[RankWait]:
    call_count_by_rank: Counter[int] = Counter()
    waited_ns_by_rank: Counter[int] = Counter()
    lost_ns_by_rank: Counter[int] = Counter()
    for (rank_index, call_index), call_wait_ns in waiting_ns.items():
        call_count_by_rank[rank_index] += 1
        waited_ns_by_rank[rank_index] += call_wait_ns
        lost_ns_by_rank[rank_index] += ranks[rank_index].calls[call_index].measure_exposed_within(call_wait_ns)
    indexes_by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for rank_index, analysis in enumerate(ranks):
        if analysis.rank is not None:
            indexes_by_rank[analysis.rank].append(rank_index)
    return [
        RankWait(
            rank=rank,
            calls=sum(call_count_by_rank[call_index] for call_index in rank_indexes),
            last=sum(last_counts[call_index] for call_index in rank_indexes),
            waited_ns=sum(waited_ns_by_rank[call_index] for call_index in rank_indexes),
            lost_ns=sum(lost_ns_by_rank[call_index] for call_index in rank_indexes),
            span_ns=sum(ranks[call_index].span_ns for call_index in rank_indexes),
            caused_ns=sum(caused_ns[call_index] for call_index in rank_indexes),
        )
        for rank, rank_indexes in sorted(indexes_by_rank.items())
    ]
