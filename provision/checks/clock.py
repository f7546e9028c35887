"""Clocks that agree: munge refuses what comes from another time, and records of several nodes are laid side by side."""

from __future__ import annotations

import time

from provision.checks import Check, Outcome
from provision.facts import Unanswered, last_line
from provision.operations import Site, Target

MOST_S = 1.0


def run(site: Site, target: Target) -> Outcome:
    """Against this machine's clock, as seen in the middle of the question's way there and back."""
    before = time.time()
    answer = target.node.run(["date", "+%s.%N"], timeout_s=10)
    after = time.time()
    if answer.code != 0:
        raise Unanswered(f"{target.node.name}: it does not tell the time: {last_line(answer)}")
    return judge(float(answer.stdout), before, after)


def judge(there_s: float, before_s: float, after_s: float) -> Outcome:
    """Passed where the clocks are surely within a second: the way there and back counts against them."""
    offset = there_s - (before_s + after_s) / 2
    unsure = (after_s - before_s) / 2
    says = f"{offset:+.3f} s from this machine's clock, within {unsure:.3f} s"
    if abs(offset) + unsure <= MOST_S:
        return Outcome(True, says, measured={"offset_s": offset, "unsure_s": unsure})
    return Outcome(False, says, "let chrony set it: sudo chronyc makestep; see chronyc sources")


CLOCK = Check("clock", run)
