"""One acceptance test per file: what a node has to show before anybody trains on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from provision.operations import Site, Target


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
