"""Estimates when runs end that wait for the same nodes, to tell which of them end before the lease of the nodes.

The estimate is simple, and rather too late than too early. A run takes whole nodes. It starts when enough nodes are free and
all runs before it have started, and it keeps its nodes for its whole time: the mean of the completed runs of its cell in this
workspace, else its time limit. Runs of other people and of other workspaces are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from shardlab.run import Run, parts_of


class RunTime(msgspec.Struct, frozen=True):
    """What a run that has not ended still needs."""

    run_id: str
    nodes: int
    left_s: float | None
    """Seconds from its start, or from now if it is running; None: not known."""
    how: Literal["recorded", "limit", "unknown"]


class EstimatedEnd(msgspec.Struct, frozen=True):
    """When a run ends, in seconds from now."""

    end_s: float
    is_least: bool
    """Whether the end is only known to be not earlier, because the time of this run or of a run before it is not known."""


def time_of(run: Run, recorded: Mapping[str, float], elapsed_s: float = 0.0) -> RunTime:
    """recorded: the mean seconds of the completed runs of a cell, by the name of the cell. elapsed_s: since the run started."""
    parts = parts_of(run.run_id)
    mean = recorded.get(parts.cell) if parts is not None else None
    if mean is not None and mean > elapsed_s:
        return RunTime(run.run_id, run.world.nnodes, mean - elapsed_s, "recorded")
    if run.limit_s is not None:
        return RunTime(run.run_id, run.world.nnodes, max(run.limit_s - elapsed_s, 0.0), "limit")
    return RunTime(run.run_id, run.world.nnodes, None, "unknown")


class NodeSchedule:
    """The nodes of a cluster, and until when the runs that were added take them."""

    def __init__(self, nodes: int) -> None:
        self.nodes = max(nodes, 1)
        self._free = [EstimatedEnd(0.0, is_least=False)] * self.nodes
        self._last_start = EstimatedEnd(0.0, is_least=False)

    def end_of(self, run: RunTime, after: EstimatedEnd | None = None) -> EstimatedEnd:
        """When the run would end if it were added now. after: it starts only then."""
        return self._placed(run, after)[1]

    def add(self, run: RunTime, after: EstimatedEnd | None = None) -> EstimatedEnd:
        """Give the run the nodes that are free first; return when it ends."""
        self._last_start, end = self._placed(run, after)
        self._free = [*self._free[self._number(run) :], *[end] * self._number(run)]
        self._free.sort(key=_order)
        return end

    def _number(self, run: RunTime) -> int:
        return min(run.nodes, self.nodes)

    def _placed(self, run: RunTime, after: EstimatedEnd | None) -> tuple[EstimatedEnd, EstimatedEnd]:
        """(its start, its end)."""
        bounds = [self._last_start, *self._free[: self._number(run)], *([after] if after is not None else [])]
        start = EstimatedEnd(max(bound.end_s for bound in bounds), any(bound.is_least for bound in bounds))
        return start, EstimatedEnd(start.end_s + (run.left_s or 0.0), start.is_least or run.left_s is None)


def _order(end: EstimatedEnd) -> tuple[float, bool]:
    return end.end_s, end.is_least
