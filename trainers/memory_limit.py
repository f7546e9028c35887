"""Limits the memory of a rank, so that the out-of-memory boundary of a study can be searched on any machine."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

GIB = 2**30


def hold(limit_gib: float, device: torch.device) -> None:
    """Limit this process to `limit_gib` of its GPU's memory from now on.

    On a CPU the limit replaces a GPU's memory: it is the private writable memory (RLIMIT_DATA, as the kernel counts it) that
    the process may allocate in addition to its present memory, when its libraries are loaded and no model is built. Beyond
    the limit torch reports that it cannot allocate memory.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total), device)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + int(limit_gib * GIB), hard))


def _data_bytes() -> int:
    """What the kernel counts against RLIMIT_DATA now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(kib) * 1024
