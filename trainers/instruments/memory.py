"""Peak memory of a step: of the GPU's allocator, if there is a GPU, and of the process, as the kernel counts it."""

from __future__ import annotations

import psutil
import torch


class MemoryMeter:
    """`start` before a step, `read` after it; neither waits for the device, as the allocator lives on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()

    def start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> dict[str, int]:
        """Bytes: rss (resident memory now); on a GPU also allocated and reserved (peaks since `start`)."""
        found = {"rss": int(self._process.memory_info().rss)}
        if self._device.type == "cuda":
            found["allocated"] = torch.cuda.max_memory_allocated(self._device)
            found["reserved"] = torch.cuda.max_memory_reserved(self._device)
        return found
