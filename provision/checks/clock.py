"""Checks that the clocks of the nodes agree: munge rejects messages with a wrong time, and records are compared by time.

How far they may differ: provision/clock.py.
"""

from __future__ import annotations

from provision import clock
from provision.check import Check, Outcome
from provision.operation import Site, Target


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if the clocks differ by at most one second, even with the uncertainty added."""
    offset = clock.measure_clock_offset(target.node)
    if offset.agrees:
        return Outcome(True, str(offset), measured={"offset_s": offset.ahead_s, "unsure_s": offset.uncertainty_s})
    return Outcome(False, str(offset), "set the clock with sudo chronyc makestep; chronyc sources lists the time servers")


CLOCK = Check("clock", run)
