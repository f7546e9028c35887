"""One acceptance test per file: what a node has to show before anybody trains on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from provision.operations import Site, Target

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What a check found. `passed` is None where it does not apply; `advice` says what to do about a failure."""

    passed: bool | None
    says: str
    advice: str | None = None
    measured: dict[str, float | int | str] = field(default_factory=dict)  # units in the names
    transcript: str = ""  # all that a failed program said


@dataclass(frozen=True)
class Check:
    """A name and the test itself, which raises Unanswered where a node does not answer. once: of all nodes together, asked of
    the first."""

    name: str
    run: Callable[[Site, Target], Outcome]
    once: bool = False


def each(targets: Sequence[Target], ask: Callable[[Target], T]) -> list[T]:
    """What each says, all asked at once."""
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return list(pool.map(ask, targets))


def without(site: Site) -> str:
    """The end of a sentence about all nodes: which of them it does not speak of."""
    return f"; without {', '.join(absent)}" if (absent := site.absent()) else ""
