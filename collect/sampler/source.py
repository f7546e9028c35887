"""Defines the base class of all sources of telemetry, and a class for files of the kernel that stay open."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path

from shardlab.runs.record import Sample

READ_CHUNK_BYTES = 65536


class TelemetrySource(ABC):
    """Fills some fields of each sample. A field whose value cannot be read stays None.

    failures: how often each quantity could not be read, by the name of the quantity.

    unsupported: for each quantity, the number of devices that do not support it; it is not queried again on these devices.

    remarks: sentences about devices, such as a GPU that was lost.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.unsupported: Counter[str] = Counter()
        self.remarks: list[str] = []

    @abstractmethod
    def fill(self, sample: Sample) -> None:
        """Read the present values and write them into the fields of the sample that this source fills.

        Errors of the kernel or of a driver are counted in `failures` and raise no error.
        """

    def close(self) -> None:  # noqa: B027 - most sources have nothing to end
        """Close what the source opened or started, such as a process."""


class KernelFile:
    """A file of /proc or /sys that is opened once and read for each sample, because opening takes several times as long."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError if the kernel does not provide this file."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        """The present content of the file. Raises OSError, such as ENODEV if the network interface was removed."""
        file_content = b""
        while chunk := os.pread(self._descriptor, READ_CHUNK_BYTES, len(file_content)):  # /proc returns one page a call
            file_content += chunk
        return file_content

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
