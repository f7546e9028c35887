"""Reads the processor time and the bytes read from and written to storage of this process, as the kernel counts them."""

from __future__ import annotations

import os
import time
from typing import Any

_COUNTERS = {b"read_bytes": "disk_read_bytes", b"write_bytes": "disk_write_bytes"}  # name in /proc/PID/io -> in StepRecord


class ProcessUsage:
    """Reads the counters of the process that created this object."""

    def __init__(self) -> None:
        try:
            self._io_descriptor: int | None = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the kernel was built without task accounting
            self._io_descriptor = None

    def read(self) -> dict[str, Any]:
        """`cpu_s`, `disk_read_bytes` and `disk_write_bytes` of all threads since the start of the process. Counters that the
        kernel does not have are absent."""
        counters: dict[str, Any] = {"cpu_s": time.process_time()}
        try:
            counter_text = os.pread(self._io_descriptor, 4096, 0) if self._io_descriptor is not None else b""
        except OSError:
            return counters
        for line in counter_text.splitlines():
            counter_name, _, counter_value = line.partition(b":")
            if counter_name in _COUNTERS:
                counters[_COUNTERS[counter_name]] = int(counter_value)
        return counters

    def close(self) -> None:
        """Close the kernel's file with the counters of this process."""
        if self._io_descriptor is not None:
            os.close(self._io_descriptor)
            self._io_descriptor = None
