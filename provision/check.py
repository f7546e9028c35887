"""The interface of an acceptance check. A node is ready to train when each check passes or does not apply to the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from provision.operation import Site, Target
from shardlab.cluster.all_reduce import MeasuredAllReduce

T = TypeVar("T")


class Outcome(msgspec.Struct, frozen=True):
    """The result of a check."""

    passed: bool | None
    """None: the check does not apply."""
    says: str
    """The result in a sentence, for the user."""
    advice: str | None = None
    """What the user can do about a failure, or about a warning in the sentence of a check that passed."""
    measured: dict[str, float | int | str] = {}
    """Measured values by name; the name contains the unit."""
    transcript: str = ""
    """The output of the program that failed."""
    all_reduces: tuple[MeasuredAllReduce, ...] = ()
    """The all-reduces that the check measured, for the inventory."""


class Check(msgspec.Struct, frozen=True):
    """An acceptance check of a node or of the network: a name, and the function that runs the check."""

    name: str
    run: Callable[[Site, Target], Outcome]
    """Raises Unanswered if a node does not answer."""
    once: bool = False
    """True: the check runs once for all nodes, and `run` gets the first node as its target."""


def map_targets(targets: Sequence[Target], ask_target: Callable[[Target], T]) -> list[T]:
    """Call `ask_target` for all targets in parallel. Returns the results in the order of the targets."""
    with ThreadPoolExecutor(max(1, len(targets))) as thread_pool:
        return list(thread_pool.map(ask_target, targets))


def absent_nodes_note(site: Site) -> str:
    """The text that a check appends to a sentence about all nodes, such as `; without gpu1`. It names the nodes that did not
    take part in the check; '' if all nodes took part."""
    return f"; without {', '.join(absent_names)}" if (absent_names := site.list_absent_names()) else ""
