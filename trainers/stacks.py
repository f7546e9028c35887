"""Where a rank that hangs is at: the stacks of all its threads go to its log before its supervisor ends the run as `hung`."""

from __future__ import annotations

import faulthandler
import time

# A timer is a thread of its own, in C, that also gets at an interpreter which waits in a collective. To set it anew takes some
# 50 us, the look at the clock 0.1 us: so it is set when so much of the bound has passed, and steps of a few ms do not feel it.
RENEWED = 0.1
# From the bound's start it fires after 0.8 to 0.9 of it, before the supervisor, and then again and again: whatever else kept
# the run alive meanwhile, in every stretch as long as the bound each rank says at least once where it is.
FIRES = 0.9


class _Timer:
    """faulthandler's one timer of this process; silent until it is armed."""

    def __init__(self) -> None:
        self._limit_s, self._set_s = float("inf"), 0.0

    def arm(self, limit_s: float) -> None:
        """From now on write the stacks to standard error after 0.9 x limit_s without a sign of life; also where the process
        is aborted, as NCCL's own watchdog does it."""
        faulthandler.enable()
        self._limit_s = limit_s
        self._set()

    def alive(self) -> None:
        """This rank got on."""
        if time.monotonic() - self._set_s > RENEWED * self._limit_s:
            self._set()

    def _set(self) -> None:
        self._set_s = time.monotonic()
        faulthandler.dump_traceback_later(FIRES * self._limit_s, repeat=True)


_timer = _Timer()
arm, alive = _timer.arm, _timer.alive
