"""Collectives by kind and process group: calls, bytes, bandwidth, hidden share, and what the link between the GPUs can do.

Bandwidths are defined as by nccl-tests (doc/PERFORMANCE.md). The algorithm bandwidth is the size of the message over the time.
The bus bandwidth is that times a factor of the collective and the number of ranks, so that it does not depend on the number of
ranks and compares with the bandwidth of a link. 1 GB/s is 1e9 bytes/s. The time is that of the transfer, without waiting for
slow ranks, if the calls were matched over ranks (`stragglers`); else it is the whole duration, and the bandwidth is a lower
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from collect.traces.calls import CollectiveCall, ProcessGroup
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.stragglers import Waits
from shardlab import gpu_models

# (number of ranks) -> bus bandwidth / algorithm bandwidth, by nccl-tests
_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send", "recv", "send_recv"), lambda n: 1.0),
}


class CollectiveUse(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one collective in one process group, of all ranks and profiled steps together. Times in ns.

    message_bytes: of all calls, as nccl-tests counts a message; None if a trace does not say it for each call. hidden_ns: of
    total_ns, something computes meanwhile. matched: calls that were matched over ranks. waited_ns: of these, waiting for
    slow ranks. link: the link between the GPUs, and link_gb_per_s what it can do in one direction by the data sheet; None
    if the ranks of the group are on several hosts, or the trace does not say the GPU.
    """

    collective: str
    group: ProcessGroup
    calls: int
    total_ns: int
    message_bytes: int | None
    hidden_ns: int
    matched: int
    waited_ns: int
    link: str | None
    link_gb_per_s: float | None

    @property
    def transfer_ns(self) -> int | None:
        """The time without waiting for slow ranks in ns; None unless all calls were matched over ranks."""
        return self.total_ns - self.waited_ns if self.matched == self.calls else None

    @property
    def hidden_pct(self) -> float | None:
        """The share of the calls' durations during which something computes, in percent."""
        return 100 * self.hidden_ns / self.total_ns if self.total_ns else None

    @property
    def timed_ns(self) -> int:
        """The time that bandwidths are of, in ns: of the transfer, or of the calls if not all were matched."""
        return self.total_ns if self.transfer_ns is None else self.transfer_ns

    @property
    def bus_bytes(self) -> float | None:
        """The size of the messages times the factor of nccl-tests; None if the size or the number of ranks is not known.

        None for a single rank, too: it sends nothing.
        """
        factor, size = _FACTORS.get(self.collective), self.group.size or 0
        return None if self.message_bytes is None or factor is None or size < 2 else self.message_bytes * factor(size)

    @property
    def algorithm_gb_per_s(self) -> float | None:
        """Size of the messages over their time, in 1e9 bytes/s."""
        return self.message_bytes / self.timed_ns if self.message_bytes is not None and self.timed_ns else None

    @property
    def bus_gb_per_s(self) -> float | None:
        """The algorithm bandwidth times the factor of nccl-tests, in 1e9 bytes/s."""
        return self.bus_bytes / self.timed_ns if self.bus_bytes is not None and self.timed_ns else None

    @property
    def link_pct(self) -> float | None:
        """The bus bandwidth as a share of what the link can do, in percent."""
        bus = self.bus_gb_per_s
        return 100 * bus / self.link_gb_per_s if bus is not None and self.link_gb_per_s else None


def uses(ranks: Sequence[RankAnalysis], waited: Waits) -> list[CollectiveUse]:
    """Of all ranks together, that which takes the longest first."""
    calls: dict[tuple[str, ProcessGroup], list[tuple[CollectiveCall, int | None]]] = {}
    for place, analysis in enumerate(ranks):
        for index, call in enumerate(analysis.calls):
            key = call.name, analysis.groups[call.group]
            calls.setdefault(key, []).append((call, waited.waited.get((place, index))))
    found = [_use(ranks, name, group, every) for (name, group), every in calls.items()]
    return sorted(found, key=lambda one: (-one.total_ns, one.collective, one.group.name, one.group.ranks))


def _use(
    ranks: Sequence[RankAnalysis], name: str, group: ProcessGroup, calls: Sequence[tuple[CollectiveCall, int | None]]
) -> CollectiveUse:
    sizes = [call.message_bytes for call, _ in calls]
    known = [size for size in sizes if size is not None]
    waiting = [ns for _, ns in calls if ns is not None]
    gpu = _gpu(ranks, group)
    link = gpu_models.model(gpu) if gpu else None
    return CollectiveUse(
        collective=name,
        group=group,
        calls=len(calls),
        total_ns=sum(call.duration_ns for call, _ in calls),
        message_bytes=sum(known) if len(known) == len(sizes) else None,
        hidden_ns=sum(call.hidden_ns for call, _ in calls),
        matched=len(waiting),
        waited_ns=sum(waiting),
        link=link.link if link else None,
        link_gb_per_s=link.link_gb_per_s / 2 if link else None,
    )


def _gpu(ranks: Sequence[RankAnalysis], group: ProcessGroup) -> str:
    """The GPU model of the group's ranks if all of them were profiled on one host with one model, else ""."""
    by_rank = {one.rank: one for one in ranks}
    members = [by_rank.get(rank) for rank in group.ranks]
    places = {(one.host, one.gpu) if one else ("", "") for one in members}
    host, gpu = places.pop() if len(places) == 1 else ("", "")
    return gpu if host else ""
