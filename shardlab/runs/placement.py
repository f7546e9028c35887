"""The nodes on which a run was started, for clusters whose nodes share no folder. The first node records them in an event."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardlab.runs.record import Event

# The name of the event; `nodes` in its data contains the names of the run's nodes, beginning with node 0
PLACED_EVENT = "placed"


class Placement(msgspec.Struct, frozen=True):
    """The nodes on which a run was started."""

    first_node: str
    """The host name of the first node, which recorded the event PLACED_EVENT."""
    nodes: list[str]
    """The names of the run's nodes, as in the inventory."""


def read_placement(events: Sequence[Event]) -> Placement | None:
    """The placement of a run according to its events; None if the run was not started, or if its nodes share a folder."""
    placed_event = next((event for event in reversed(events) if event.event == PLACED_EVENT), None)
    if placed_event is None:
        return None
    return Placement(placed_event.host, [str(name) for name in placed_event.data.get("nodes", [])])
