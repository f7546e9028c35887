"""Acceptance checks, one per file: each must pass, or not apply, before a node is ready to train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from provision.operations import Site, Target

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The result of a check. passed: None if the check does not apply. advice: what to do about a failure."""

    passed: bool | None
    says: str
    advice: str | None = None
    measured: dict[str, float | int | str] = field(default_factory=dict)  # units in the names
    transcript: str = ""  # the output of a failed program


@dataclass(frozen=True)
class Check:
    """An acceptance check. run: raises Unanswered if a node does not answer. once: it is a check of all nodes together, which
    is run on the first one."""

    name: str
    run: Callable[[Site, Target], Outcome]
    once: bool = False


def each(targets: Sequence[Target], ask: Callable[[Target], T]) -> list[T]:
    """The answers of all targets, which are asked at the same time."""
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return list(pool.map(ask, targets))


def without(site: Site) -> str:
    """The end of a sentence about all nodes: the nodes that it does not include."""
    return f"; without {', '.join(absent)}" if (absent := site.absent()) else ""
