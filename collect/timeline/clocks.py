"""Corrects the times of the wall clocks of all hosts of a run to the clock of the host of rank 0."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardlab.files.decoders import DECODE_FAULTS
from shardlab.record_types import ClockOffset
from shardlab.runs.record import CLOCK_EVENT, Event

_FIRST_RANK = re.compile(r"rank-(\d{5,9})")


class ComparedClock(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of one host of a run, compared with the clock of the host of rank 0."""

    host: str
    first_rank: int
    """The lowest rank on this host."""
    at_s: list[float]
    """When the clocks were compared, in seconds since the epoch by the clock of this host; at least one moment."""
    offset_s: list[float]
    """For each moment of `at_s` how far the clock of this host was ahead, in seconds."""
    within_s: float
    """The greatest possible error of these offsets, in seconds."""

    def correct_times(self, local_times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert times of this clock to times of the clock of the host of rank 0. The result has the shape of `local_times_s`.

        Between two comparisons of the clocks, the offset is interpolated. Before the first and after the last comparison, the
        offset is constant.
        """
        return local_times_s - np.interp(local_times_s, self.at_s, self.offset_s)

    @property
    def drift_s(self) -> float | None:
        """The change of the offset from the first comparison to the last, in seconds; None if there was only one comparison."""
        return self.offset_s[-1] - self.offset_s[0] if len(self.offset_s) > 1 else None


class HostClocks:
    """The clocks of the hosts of a run, and the host of each rank."""

    def __init__(self, events: Iterable[Event], hosts: Iterable[str]) -> None:
        """Collect the comparisons of clocks from the events of a run.

        events: the events of the run, sorted by time. hosts: the names of the hosts that wrote a description of themselves.

        Clocks are compared only in runs on several hosts. Launchers number the ranks host by host, so the host of a rank is the
        host with the greatest first rank that is not above this rank.
        """
        clock_by_host: dict[str, ComparedClock] = {}
        for event in events:
            rank_match = _FIRST_RANK.fullmatch(event.writer)
            if event.event != CLOCK_EVENT or rank_match is None:
                continue
            try:
                clock_offset = msgspec.convert(event.data, ClockOffset)
            except DECODE_FAULTS:
                continue
            earlier_clock = clock_by_host.get(event.host)
            clock_by_host[event.host] = ComparedClock(
                host=event.host,
                first_rank=int(rank_match[1]),
                at_s=[*(earlier_clock.at_s if earlier_clock else ()), event.wall_s],
                offset_s=[*(earlier_clock.offset_s if earlier_clock else ()), clock_offset.offset_s],
                within_s=max(clock_offset.within_s, earlier_clock.within_s if earlier_clock else 0.0),
            )
        self.clock_by_host = clock_by_host
        host_names = sorted(set(hosts))
        self._single_host = host_names[0] if len(host_names) == 1 else None

    def find_host(self, rank: int) -> str | None:
        """The host of a rank; None if the records do not say on which host the rank ran."""
        candidate_clocks = [clock for clock in self.clock_by_host.values() if clock.first_rank <= rank]
        return max(candidate_clocks, key=lambda clock: clock.first_rank).host if candidate_clocks else self._single_host

    def correct_times(self, host: str | None, local_times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert times of the clock of a host to times of the clock of rank 0's host; unchanged if the two were never
        compared."""
        return self.clock_by_host[host].correct_times(local_times_s) if host in self.clock_by_host else local_times_s

    def is_known(self, host: str | None) -> bool:
        """Whether times of this host can be compared with times of the other hosts of the run."""
        return host in self.clock_by_host or (self._single_host is not None and host == self._single_host)
