"""The interface of an acceptance check: it must pass, or not apply, before a node is ready to train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from provision.operation import Site, Target

T = TypeVar("T")


class Outcome(msgspec.Struct, frozen=True):
    """The result of a check."""

    passed: bool | None  # None: the check does not apply
    says: str
    advice: str | None = None  # what to do about a failure
    measured: dict[str, float | int | str] = {}  # units in the names
    transcript: str = ""  # the output of a failed program


class Check(msgspec.Struct, frozen=True):
    """An acceptance check."""

    name: str
    run: Callable[[Site, Target], Outcome]  # raises Unanswered if a node does not answer
    once: bool = False  # whether it checks all nodes together; then it is run with the first node


def each(targets: Sequence[Target], ask: Callable[[Target], T]) -> list[T]:
    """The answers of all targets, which are asked at the same time."""
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return list(pool.map(ask, targets))


def without(site: Site) -> str:
    """The end of a sentence about all nodes: the nodes that it does not include."""
    return f"; without {', '.join(absent)}" if (absent := site.absent()) else ""
