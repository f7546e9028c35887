"""The wall clocks of a run's hosts, corrected to that of rank 0's host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardlab.record import ClockRecord


class HostClock(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of one host of a run.

    ranks: the ranks on this host. at_s, offset_s: when its clock was compared with that of rank 0's host, in seconds since the
    epoch by its own clock, and by how much it was ahead; as many of both. within_s: the greatest error of these offsets; None
    if the clocks were never compared.
    """

    host: str
    ranks: list[int]
    at_s: list[float]
    offset_s: list[float]
    within_s: float | None

    def corrected(self, wall_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Moments by this clock as moments by the clock of rank 0's host, of the same shape.

        Between two comparisons the offset is interpolated; before the first and after the last it is constant.
        """
        return wall_s - np.interp(wall_s, self.at_s, self.offset_s) if self.at_s else wall_s

    @property
    def drift_s(self) -> float | None:
        """By how much the offset changed from the first comparison to the last one; None without two comparisons."""
        return self.offset_s[-1] - self.offset_s[0] if len(self.offset_s) > 1 else None


def of_hosts(records: Mapping[str, Sequence[ClockRecord]]) -> dict[str, HostClock]:
    """The clock of each host that wrote comparisons."""
    clocks = {}
    for host, compared in records.items():
        known = sorted(
            (record.wall_s, record.offset_s, record.within_s)
            for record in compared
            if record.offset_s is not None and record.within_s is not None
        )
        clocks[host] = HostClock(
            host=host,
            ranks=sorted({rank for record in compared for rank in record.ranks}),
            at_s=[at for at, _, _ in known],
            offset_s=[offset for _, offset, _ in known],
            within_s=max((within for _, _, within in known), default=None),
        )
    return clocks
