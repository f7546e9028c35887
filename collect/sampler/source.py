"""What every source of telemetry has in common: kernel files kept open, and a count of what could not be read.

Opening a file of /proc or /sys at every tick costs several times what reading it does, so each stays open and is read
again from its start with pread.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path

from shardlab.record import Sample

CHUNK_BYTES = 65536


class Source(ABC):
    """Fills some fields of a sample. A field that cannot be read stays absent.

    failures: how often each thing could not be read. unsupported: on how many devices each thing is not supported; it is asked
    once. remarks: sentences about devices, such as a GPU that was lost.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.unsupported: Counter[str] = Counter()
        self.remarks: list[str] = []

    @abstractmethod
    def fill(self, sample: Sample) -> None:
        """Read once and set this source's fields. Raises nothing for a kernel or driver that does not answer."""

    def close(self) -> None:  # noqa: B027 - most sources have nothing to end
        """End what the source started."""


class KernelFile:
    """A file of /proc or /sys, opened once."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the kernel does not have it."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        """Its content now. Raises OSError, such as ENODEV for an interface that went away."""
        content = b""
        while more := os.pread(self._descriptor, CHUNK_BYTES, len(content)):  # /proc gives about a page at a time
            content += more
        return content

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
