"""Writes the stacks of all threads of a hanging rank to its log, before the supervisor ends the run as `hung`."""

from __future__ import annotations

import faulthandler
import time

# The timer is a thread in C, so it works even if the interpreter waits in a collective. Setting it takes about 50 us, reading
# the clock 0.1 us. So it is set again only after this share of the limit, and steps of a few ms are not slowed down.
RENEWED = 0.1
# It fires 0.8 to 0.9 of the limit after the last progress, before the supervisor, and then repeatedly. So in every period as
# long as the limit, a rank without progress writes its stacks at least once, even if other ranks keep the run alive.
FIRES = 0.9


class _Timer:
    """faulthandler's one timer of this process; silent until it is armed."""

    def __init__(self) -> None:
        self._limit_s, self._set_s = float("inf"), 0.0

    def arm(self, limit_s: float) -> None:
        """From now on, write the stacks to standard error after 0.9 x limit_s without progress, and if the process aborts, for
        example by NCCL's watchdog."""
        faulthandler.enable()
        self._limit_s = limit_s
        self._set()

    def alive(self) -> None:
        """Report that this rank made progress."""
        if time.monotonic() - self._set_s > RENEWED * self._limit_s:
            self._set()

    def _set(self) -> None:
        self._set_s = time.monotonic()
        faulthandler.dump_traceback_later(FIRES * self._limit_s, repeat=True)


_timer = _Timer()
arm, alive = _timer.arm, _timer.alive
