"""Clocks that agree: munge refuses what comes from another time, and records of several nodes are laid side by side."""

from __future__ import annotations

from provision import clock
from provision.checks import Check, Outcome
from provision.operations import Site, Target


def run(site: Site, target: Target) -> Outcome:
    """Passed where the clocks are surely within a second."""
    offset = clock.measure(target.node)
    if offset.agrees:
        return Outcome(True, str(offset), measured={"offset_s": offset.seconds, "unsure_s": offset.unsure_s})
    return Outcome(False, str(offset), "let chrony set it: sudo chronyc makestep; see chronyc sources")


CLOCK = Check("clock", run)
