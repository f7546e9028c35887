"""Whether Slurm's controller is away. Since 26.05, a job step whose ranks have ended then waits for the controller."""

from __future__ import annotations

import time

from jobs.slurm.commands import is_down

ASK_S = 5.0  # between two questions to the controller
RETURN_S = 60.0  # a step of 26.05 ends up to half a minute after the controller is back


class OutageWatch:
    """Asks the controller when it matters, and remembers the answer for a moment."""

    def __init__(self) -> None:
        self._next_question = self._over = float("-inf")

    def is_away(self) -> bool:
        """Whether the controller does not answer, or has done so again for less than RETURN_S."""
        if time.monotonic() >= self._next_question:
            if is_down():
                self._over = time.monotonic() + RETURN_S
            self._next_question = time.monotonic() + ASK_S
        return time.monotonic() < self._over
