"""Computes the use of each collective: calls, bytes, hidden share, and bandwidth compared with the link between the GPUs.

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md). The algorithm bandwidth is the size of the message divided by the
time. The bus bandwidth is the algorithm bandwidth times a factor that depends on the collective and the number of ranks. So for
any number of ranks, the bus bandwidth can be compared with the bandwidth of a link. 1 GB/s is 1e9 bytes/s.

If the calls were matched over ranks (`stragglers`), the time is the time of the transfer, without waiting for slow ranks.
Otherwise the time is the whole duration of the calls, and the bandwidth is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from collect.traces.calls import CollectiveCall, ProcessGroup
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.stragglers import RankWaits
from shardlab.hardware import gpu_models

# Collective -> function that gives for a number of ranks n the bus bandwidth divided by the algorithm bandwidth (nccl-tests).
_BUS_FACTOR_BY_COLLECTIVE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("all_gather", "reduce_scatter", "gather", "scatter"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send", "recv", "send_recv"), lambda n: 1.0),
}


class CollectiveUse(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one collective in one process group, of all ranks and profiled steps together. Times are in ns."""

    collective: str
    """The name of the collective."""
    group: ProcessGroup
    """The process group."""
    profiled: int
    """The number of ranks of the group that were profiled."""
    calls: int
    """The number of calls."""
    total_ns: int
    """The sum of their durations."""
    message_bytes: int | None
    """The sum of the message sizes of all calls, as nccl-tests counts them; None if the size of a call is unknown."""
    sent_bytes: float | None
    """The bytes that all ranks sent for these calls; None if the number is not known."""
    hidden_ns: int
    """The part of total_ns during which compute runs."""
    matched: int
    """The number of calls that were matched over ranks."""
    waited_ns: int
    """The time of these calls spent waiting for slow ranks."""
    link: str | None
    """The link between the GPUs."""
    link_gb_per_s: float | None
    """Its bandwidth in one direction according to the data sheet, in 1e9 bytes/s. Both are None if the ranks of the group are
    on several hosts, or if the trace does not say the model of the GPU."""

    @property
    def is_partial(self) -> bool:
        """Whether ranks of the group were not profiled. Then the time of the transfer is an upper bound, because all profiled
        ranks may have waited for another one, and bandwidths are lower bounds."""
        return self.group.size is not None and self.profiled < self.group.size

    @property
    def transfer_ns(self) -> int | None:
        """The duration of the calls without waiting for slow ranks, in ns; None unless all calls were matched over ranks."""
        return self.total_ns - self.waited_ns if self.matched == self.calls else None

    @property
    def hidden_pct(self) -> float | None:
        """The share of the duration of the calls during which compute runs, in percent."""
        return 100 * self.hidden_ns / self.total_ns if self.total_ns else None

    @property
    def timed_ns(self) -> int:
        """The time from which bandwidths are computed, in ns: of the transfer, or of the whole calls if not all calls were
        matched."""
        return self.total_ns if self.transfer_ns is None else self.transfer_ns

    @property
    def bus_bytes(self) -> float | None:
        """The size of the messages times the factor of nccl-tests, in bytes; None if the size or the number of ranks is not
        known.

        Also None for a group of a single rank, which sends nothing. For an all_to_all, whose parts may differ in size, they are
        the bytes that are sent to other ranks.
        """
        if self.collective == "all_to_all":
            return self.sent_bytes or None
        get_factor, size = _BUS_FACTOR_BY_COLLECTIVE.get(self.collective), self.group.size or 0
        return None if self.message_bytes is None or get_factor is None or size < 2 else self.message_bytes * get_factor(size)

    @property
    def algorithm_gb_per_s(self) -> float | None:
        """The algorithm bandwidth: the size of the messages divided by their time, in 1e9 bytes/s."""
        return self.message_bytes / self.timed_ns if self.message_bytes is not None and self.timed_ns else None

    @property
    def bus_gb_per_s(self) -> float | None:
        """The bus bandwidth: the algorithm bandwidth times the factor of nccl-tests, in 1e9 bytes/s."""
        return self.bus_bytes / self.timed_ns if self.bus_bytes is not None and self.timed_ns else None

    @property
    def link_pct(self) -> float | None:
        """The bus bandwidth in percent of the bandwidth of the link."""
        bus_gb_per_s = self.bus_gb_per_s
        return 100 * bus_gb_per_s / self.link_gb_per_s if bus_gb_per_s is not None and self.link_gb_per_s else None


def compute_collective_uses(ranks: Sequence[RankAnalysis], waits: RankWaits) -> list[CollectiveUse]:
    """The use of each collective in each process group, over all ranks together. The longest total time comes first.

    waits: for the calls that were matched over ranks, how long a rank waited for slow ranks.
    """
    calls_of_group: dict[tuple[str, ProcessGroup], list[tuple[CollectiveCall, int | None]]] = {}
    for rank_index, analysis in enumerate(ranks):
        for call_index, call in enumerate(analysis.calls):
            name_and_group = call.name, analysis.groups[call.group]
            calls_of_group.setdefault(name_and_group, []).append((call, waits.waited_ns.get((rank_index, call_index))))
    collective_uses = [_compute_use(ranks, name, group, group_calls) for (name, group), group_calls in calls_of_group.items()]
    return sorted(collective_uses, key=lambda use: (-use.total_ns, use.collective, use.group.name, use.group.ranks))


def _compute_use(
    ranks: Sequence[RankAnalysis], name: str, process_group: ProcessGroup, calls: Sequence[tuple[CollectiveCall, int | None]]
) -> CollectiveUse:
    message_bytes_of_calls = [call.message_bytes for call, _ in calls]
    known_message_bytes = [message_bytes for message_bytes in message_bytes_of_calls if message_bytes is not None]
    known_sent_bytes = [call.sent_bytes for call, _ in calls if call.sent_bytes is not None]
    known_waits_ns = [waiting_ns for _, waiting_ns in calls if waiting_ns is not None]
    gpu_name = _find_gpu_model(ranks, process_group)
    gpu_model = gpu_models.find_gpu_model(gpu_name) if gpu_name else None
    return CollectiveUse(
        collective=name,
        group=process_group,
        profiled=len({analysis.rank for analysis in ranks if process_group in analysis.groups}),
        calls=len(calls),
        total_ns=sum(call.duration_ns for call, _ in calls),
        message_bytes=sum(known_message_bytes) if len(known_message_bytes) == len(message_bytes_of_calls) else None,
        sent_bytes=sum(known_sent_bytes) if len(known_sent_bytes) == len(calls) else None,
        hidden_ns=sum(call.hidden_ns for call, _ in calls),
        matched=len(known_waits_ns),
        waited_ns=sum(known_waits_ns),
        link=gpu_model.link if gpu_model else None,
        link_gb_per_s=gpu_model.link_gb_per_s / 2 if gpu_model else None,
    )


def _find_gpu_model(ranks: Sequence[RankAnalysis], process_group: ProcessGroup) -> str:
    """The GPU model of the ranks of a group, if all of these ranks were profiled on one host with one GPU model; else ""."""
    analysis_by_rank = {analysis.rank: analysis for analysis in ranks}
    member_analyses = [analysis_by_rank.get(rank) for rank in process_group.ranks]
    hosts_and_gpus = {(analysis.host, analysis.gpu) if analysis else ("", "") for analysis in member_analyses}
    host, gpu_model = hosts_and_gpus.pop() if len(hosts_and_gpus) == 1 else ("", "")
    return gpu_model if host else ""
