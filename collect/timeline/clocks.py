"""The wall clocks of a run's hosts, corrected to that of rank 0's host."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardlab.decoders import DECODE_FAULTS
from shardlab.record import CLOCK, ClockOffset, Event

_FIRST_RANK = re.compile(r"rank-(\d{5,9})")


class ComparedClock(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of one host of a run.

    first_rank: the lowest rank on this host. at_s, offset_s: when its clock was compared with that of rank 0's host, in seconds
    since the epoch by its own clock, and by how much it was ahead; as many of both, at least one. within_s: the greatest error
    of these offsets.
    """

    host: str
    first_rank: int
    at_s: list[float]
    offset_s: list[float]
    within_s: float

    def corrected(self, wall_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Moments by this clock as moments by the clock of rank 0's host, of the same shape.

        Between two comparisons the offset is interpolated; before the first and after the last it is constant.
        """
        return wall_s - np.interp(wall_s, self.at_s, self.offset_s)

    @property
    def drift_s(self) -> float | None:
        """By how much the offset changed from the first comparison to the last one; None without two comparisons."""
        return self.offset_s[-1] - self.offset_s[0] if len(self.offset_s) > 1 else None


class Clocks:
    """The clocks of the hosts of a run, and on which host each rank was."""

    def __init__(self, events: Iterable[Event], hosts: Iterable[str]) -> None:
        """events: of the run, ordered by time. hosts: those that described themselves.

        Only runs on several hosts compare clocks. Launchers number the ranks host by host, so a rank is on the host whose first
        rank is the nearest one below it.
        """
        found: dict[str, ComparedClock] = {}
        for event in events:
            first = _FIRST_RANK.fullmatch(event.writer)
            if event.event != CLOCK or first is None:
                continue
            try:
                compared = msgspec.convert(event.data, ClockOffset)
            except DECODE_FAULTS:
                continue
            clock = found.get(event.host)
            found[event.host] = ComparedClock(
                host=event.host,
                first_rank=int(first[1]),
                at_s=[*(clock.at_s if clock else ()), event.wall_s],
                offset_s=[*(clock.offset_s if clock else ()), compared.offset_s],
                within_s=max(compared.within_s, clock.within_s if clock else 0.0),
            )
        self.of_host = found
        named = sorted(set(hosts))
        self._only = named[0] if len(named) == 1 else None

    def host_of(self, rank: int) -> str | None:
        """The host of a rank; None if the records do not say it."""
        below = [clock for clock in self.of_host.values() if clock.first_rank <= rank]
        return max(below, key=lambda clock: clock.first_rank).host if below else self._only

    def corrected(self, host: str | None, wall_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """As of `ComparedClock`; unchanged for a host whose clock was not compared."""
        return self.of_host[host].corrected(wall_s) if host in self.of_host else wall_s

    def is_known(self, host: str | None) -> bool:
        """Whether moments of this host can be compared with those of the others."""
        return host in self.of_host or (self._only is not None and host == self._only)
