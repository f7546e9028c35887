"""A clock that the test turns, in the place of a module's `time`."""


class Clock:
    """The monotonic clock, in seconds."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now
