"""Measures how far a node's clock is from this machine's clock, and decides how far it may be (MOST_OFFSET_S)."""

from __future__ import annotations

import time

import msgspec

from provision.fact import Unanswered
from provision.node import Node, last_line

MOST_OFFSET_S = 1.0
# The most measurements of a node; a round trip to a busy node can take seconds, so a measurement may be uncertain
MOST_TRIES = 5


class Offset(msgspec.Struct, frozen=True):
    """The difference between a node's clock and this machine's clock."""

    seconds: float
    """Positive if the node's clock is ahead."""
    unsure_s: float
    """The uncertainty in seconds: half of the round-trip time of the measurement."""

    @property
    def is_decided(self) -> bool:
        """Whether the measurement is exact enough to say if the clocks differ by more than one second."""
        return self.agrees or abs(self.seconds) - self.unsure_s > MOST_OFFSET_S

    @property
    def agrees(self) -> bool:
        """Whether the clocks differ by at most one second, even if the uncertainty is added to the difference."""
        return abs(self.seconds) + self.unsure_s <= MOST_OFFSET_S

    def __str__(self) -> str:
        return f"{self.seconds:+.3f} s from this machine's clock, with an uncertainty of {self.unsure_s:.3f} s"


def measure_offset(node: Node) -> Offset:
    """Compare the node's time with this machine's time in the middle of a round trip.

    Measures up to MOST_TRIES times and uses the shortest round trip. Raises Unanswered.
    """
    node.run(["true"], timeout_s=30)  # logs in, so that the measured round trips do not include the login
    best_offset = _measure_offset_once(node)
    for _ in range(MOST_TRIES - 1):
        if best_offset.is_decided:
            break
        best_offset = min(best_offset, _measure_offset_once(node), key=lambda offset: offset.unsure_s)
    return best_offset


def _measure_offset_once(node: Node) -> Offset:
    before_s = time.time()
    date_output = node.run(["date", "+%s.%N"], timeout_s=10)
    after_s = time.time()
    if date_output.code != 0:
        raise Unanswered(f"{node.name}: the command date failed: {last_line(date_output)}")
    return Offset(float(date_output.stdout) - (before_s + after_s) / 2, (after_s - before_s) / 2)
