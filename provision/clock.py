"""Measures how far a node's clock is from this machine's clock, and decides how far it may be (MOST_OFFSET_S)."""

from __future__ import annotations

import time

import msgspec

from provision.fact import Unanswered
from provision.node import Node, find_error_line

MOST_OFFSET_S = 1.0
# The most measurements of a node; a round trip to a busy node can take seconds, so a measurement may be uncertain
MOST_TRIES = 5


class NodeClockOffset(msgspec.Struct, frozen=True):
    """The difference between a node's clock and this machine's clock."""

    ahead_s: float
    """Positive if the node's clock is ahead."""
    uncertainty_s: float
    """The uncertainty in seconds: half of the round-trip time of the measurement."""

    @property
    def is_exact_enough(self) -> bool:
        """Whether the measurement is exact enough to say if the clocks differ by more than one second."""
        return self.agrees or abs(self.ahead_s) - self.uncertainty_s > MOST_OFFSET_S

    @property
    def agrees(self) -> bool:
        """Whether the clocks differ by at most one second, even if the uncertainty is added to the difference."""
        return abs(self.ahead_s) + self.uncertainty_s <= MOST_OFFSET_S

    def __str__(self) -> str:
        return f"{self.ahead_s:+.3f} s from this machine's clock, with an uncertainty of {self.uncertainty_s:.3f} s"


def measure_clock_offset(node: Node) -> NodeClockOffset:
    """Compare the node's time with this machine's time in the middle of a round trip.

    Measures up to MOST_TRIES times and uses the shortest round trip. Raises Unanswered.
    """
    node.run(["true"], timeout_s=30)  # logs in, so that the measured round trips do not include the login
    most_exact_offset = _measure_offset_once(node)
    for _ in range(MOST_TRIES - 1):
        if most_exact_offset.is_exact_enough:
            break
        most_exact_offset = min(most_exact_offset, _measure_offset_once(node), key=lambda offset: offset.uncertainty_s)
    return most_exact_offset


def _measure_offset_once(node: Node) -> NodeClockOffset:
    before_s = time.time()
    date_output = node.run(["date", "+%s.%N"], timeout_s=10)
    after_s = time.time()
    if date_output.code != 0:
        raise Unanswered(f"{node.name}: the command date failed: {find_error_line(date_output)}")
    return NodeClockOffset(float(date_output.stdout) - (before_s + after_s) / 2, (after_s - before_s) / 2)
