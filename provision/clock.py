"""How far a node's clock is from this machine's, for the operation that sets it and the check that proves it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from provision.facts import Unanswered, last_line
from provision.providers import Node

MOST_S = 1.0


@dataclass(frozen=True)
class Offset:
    """seconds: positive where the node is ahead. unsure_s: half of the question's way there and back."""

    seconds: float
    unsure_s: float

    @property
    def agrees(self) -> bool:
        """Whether the clocks are surely within a second: the way there and back counts against them."""
        return abs(self.seconds) + self.unsure_s <= MOST_S

    def __str__(self) -> str:
        return f"{self.seconds:+.3f} s from this machine's clock, within {self.unsure_s:.3f} s"


def measure(node: Node) -> Offset:
    """Against this machine's clock, as seen in the middle of the question's way there and back. Raises Unanswered."""
    node.run(["true"], timeout_s=30)  # the way of a login counts for none
    before = time.time()
    answer = node.run(["date", "+%s.%N"], timeout_s=10)
    after = time.time()
    if answer.code != 0:
        raise Unanswered(f"{node.name}: it does not tell the time: {last_line(answer)}")
    return Offset(float(answer.stdout) - (before + after) / 2, (after - before) / 2)
