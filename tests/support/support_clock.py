"""A clock that a test sets by hand. It replaces the module `time` in the module under test."""


class Clock:
    """A fake monotonic clock, in seconds. A test sets the time by changing `now`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now
