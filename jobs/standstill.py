"""Measures how long this process was suspended: its job was suspended, or somebody stopped it, and the ranks with it."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from shardlab.pauses import LEAST_S

LOOK_S = 0.5


class Standstill:
    """Reads the clock twice a second in a thread of its own, so that waiting for a slow disk does not count as a suspension."""

    def __init__(self) -> None:
        self._lock, self._over = threading.Lock(), threading.Event()
        self._looked, self._found_s = time.monotonic(), 0.0

    def __enter__(self) -> Standstill:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()

    def take_s(self) -> float:
        """Seconds of suspension since the last call, including a suspension that has just ended."""
        self._look()
        with self._lock:
            found, self._found_s = self._found_s, 0.0
        return found

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic()
            since_s, self._looked = now - self._looked, now
            if since_s >= LEAST_S:
                self._found_s += since_s
