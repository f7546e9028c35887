"""Estimates when runs that wait for the same nodes will end, to find out which of them end before the lease of the nodes.

The estimate uses simple rules. If it is wrong, the run usually ends earlier than estimated:

- A run takes whole nodes.
- A run starts when enough nodes are free and all runs before it have started.
- A run keeps its nodes for its whole duration: the mean duration of the completed runs of its cell in this workspace, or, if no
  run of the cell has completed, its time limit.

Runs of other people and of other workspaces are not known, so they are not taken into account.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from shardlab.runs.run import Run, parse_run_id


class RunTime(msgspec.Struct, frozen=True):
    """The nodes and the time that an unfinished run still needs."""

    run_id: str
    nodes: int
    left_s: float | None
    """The seconds that the run still needs, from its start or, if it is already running, from now; None: not known."""
    source: Literal["recorded", "limit", "unknown"]
    """The source of the time: recorded times, the time limit, or neither."""


class EstimatedEnd(msgspec.Struct, frozen=True):
    """The estimated end of a run, in seconds from now."""

    end_s: float
    is_least: bool
    """Whether `end_s` is only a lower bound, because the duration of this run or of a run before it is not known."""


def estimate_run_time(run: Run, recorded: Mapping[str, float], elapsed_s: float = 0.0) -> RunTime:
    """The nodes and the time that a run still needs.

    recorded: the mean duration of the completed runs of a cell in seconds, by the name of the cell. elapsed_s: seconds since
    the run started; 0 if it has not started.
    """
    parts = parse_run_id(run.run_id)
    mean = recorded.get(parts.cell) if parts is not None else None
    if mean is not None and mean > elapsed_s and run.search is None:
        return RunTime(run.run_id, run.world.nnodes, mean - elapsed_s, "recorded")
    if run.limit_s is not None:
        tries = run.search.most_tries if run.search is not None else 1
        return RunTime(run.run_id, run.world.nnodes, max(tries * run.limit_s - elapsed_s, 0.0), "limit")
    return RunTime(run.run_id, run.world.nnodes, None, "unknown")


class NodeSchedule:
    """The nodes of a cluster, and when each node becomes free again. Runs are added in the order in which they start."""

    def __init__(self, nodes: int) -> None:
        self.nodes = max(nodes, 1)
        self._free_ends = [EstimatedEnd(0.0, is_least=False)] * self.nodes
        self._last_start = EstimatedEnd(0.0, is_least=False)

    def estimate_end(self, run: RunTime, after: EstimatedEnd | None = None) -> EstimatedEnd:
        """When the run would end if it were added next. after: the end of another run, before which the run does not start."""
        return self._place_run(run, after)[1]

    def add(self, run: RunTime, after: EstimatedEnd | None = None) -> EstimatedEnd:
        """Add a run on the nodes that become free first; return when the run ends. after: as for `estimate_end`."""
        self._last_start, end = self._place_run(run, after)
        self._free_ends = [*self._free_ends[self._count_nodes(run) :], *[end] * self._count_nodes(run)]
        self._free_ends.sort(key=_end_key)
        return end

    def _count_nodes(self, run: RunTime) -> int:
        return min(run.nodes, self.nodes)

    def _place_run(self, run: RunTime, after: EstimatedEnd | None) -> tuple[EstimatedEnd, EstimatedEnd]:
        """Compute when a run would start and end if it were added next. Returns (start, end). after: as for `estimate_end`."""
        bounds = [self._last_start, *self._free_ends[: self._count_nodes(run)], *([after] if after is not None else [])]
        start = EstimatedEnd(max(bound.end_s for bound in bounds), any(bound.is_least for bound in bounds))
        return start, EstimatedEnd(start.end_s + (run.left_s or 0.0), start.is_least or run.left_s is None)


def _end_key(end: EstimatedEnd) -> tuple[float, bool]:
    return end.end_s, end.is_least
