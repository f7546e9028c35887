"""Detects that Slurm's controller does not answer. In this case, since Slurm 26.05, a job step whose ranks have ended does not
end: it waits for the controller."""

from __future__ import annotations

import time

from jobs.slurm.commands import is_down

ASK_S = 5.0  # seconds between two questions to the controller
# seconds for which an outage still counts after its end: in Slurm 26.05, a job step ends up to half a minute later
RETURN_S = 60.0


class OutageWatch:
    """Asks whether the controller is up, and remembers the answer for ASK_S seconds."""

    def __init__(self) -> None:
        self._next_question = self._over = float("-inf")

    def is_away(self) -> bool:
        """Whether the controller does not answer, or did not answer at some moment of the last RETURN_S seconds."""
        if time.monotonic() >= self._next_question:
            if is_down():
                self._over = time.monotonic() + RETURN_S
            self._next_question = time.monotonic() + ASK_S
        return time.monotonic() < self._over
