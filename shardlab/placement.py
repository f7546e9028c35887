"""On which nodes a run was started, if each node has its own part of the run's folder. The first node records it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardlab.record import Event

PLACED = "placed"  # an event: `nodes` of its data names the nodes of the run, node 0 first


class Placement(msgspec.Struct, frozen=True):
    """first_node: the name of the machine that recorded it. nodes: the names of the run's nodes, as in the inventory."""

    first_node: str
    nodes: list[str]


def of(events: Sequence[Event]) -> Placement | None:
    """The placement of a run; None if it was not started, or if its nodes share the run's folder."""
    placed = next((event for event in reversed(events) if event.event == PLACED), None)
    return Placement(placed.host, [str(name) for name in placed.data.get("nodes", [])]) if placed is not None else None
