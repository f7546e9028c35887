"""Measures the memory of each step: the peaks of the CUDA allocator, if there is a GPU, and the process's resident memory."""

from __future__ import annotations

import psutil
import torch


class MemoryMeter:
    """Measures the memory of one step after the other: call `start` before a step and `read` after it. Neither call waits for
    the device, because the allocator's numbers are on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()

    def start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def read_sizes(self) -> dict[str, int]:
        """Bytes by kind: `rss`, the resident memory now; on a GPU also `allocated` and `reserved`, the peaks since `start`."""
        bytes_by_kind = {"rss": int(self._process.memory_info().rss)}
        if self._device.type == "cuda":
            bytes_by_kind["allocated"] = torch.cuda.max_memory_allocated(self._device)
            bytes_by_kind["reserved"] = torch.cuda.max_memory_reserved(self._device)
        return bytes_by_kind
