"""Writes the stacks of all threads of a hanging rank to the rank's log, before the supervisor ends the run as `hung`."""

from __future__ import annotations

import faulthandler
import time

# The timer is restarted only after this share of the time limit for a rank without progress has passed, so that steps of a few
# ms are not slowed down: a start of the timer takes about 50 us, reading the clock 0.1 us. The timer is a thread in C, so it
# works even if Python waits in a collective.
RESTART_SHARE = 0.1
# The timer fires when this share of the limit has passed since its last start. Its last start was at most 0.1 of the limit
# before the last progress, so it fires 0.8 to 0.9 of the limit after the last progress: before the supervisor ends the run.
# It fires again after each further 0.9 of the limit, because the run may go on if other ranks make progress.
FIRE_SHARE = 0.9


class _StackDumpTimer:
    """The timer of Python's faulthandler. A process has only one such timer. The timer is off until `arm` is called."""

    def __init__(self) -> None:
        self._limit_s, self._set_s = float("inf"), 0.0

    def start_timer(self, limit_s: float) -> None:
        """Start the timer: after 0.9 x limit_s seconds without progress, it writes the stacks of all threads to standard error.

        The stacks are also written if the process aborts, for example by NCCL's watchdog.
        """
        faulthandler.enable()
        self._limit_s = limit_s
        self._restart_timer()

    def report_progress(self) -> None:
        """Report that this rank made progress."""
        if time.monotonic() - self._set_s > RESTART_SHARE * self._limit_s:
            self._restart_timer()

    def _restart_timer(self) -> None:
        self._set_s = time.monotonic()
        faulthandler.dump_traceback_later(FIRE_SHARE * self._limit_s, repeat=True)


_timer = _StackDumpTimer()
start_timer, report_progress = _timer.start_timer, _timer.report_progress
