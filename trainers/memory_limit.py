"""Limits the memory of a rank, so that a study can search on any machine for the largest model or batch that fits."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

GIB = 2**30


def hold(limit_gib: float, device: torch.device) -> None:
    """Limit this process to `limit_gib` GiB of its GPU's memory from now on. Called before the model is built.

    On a CPU, the limit takes the place of the size of a GPU's memory: the process may allocate `limit_gib` GiB of private
    writable memory (RLIMIT_DATA, as the kernel counts it) in addition to the memory that it has now, with its libraries. Above
    the limit, torch raises an error that it cannot allocate memory.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total), device)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + int(limit_gib * GIB), hard))


def _data_bytes() -> int:
    """The bytes of this process that the kernel counts against RLIMIT_DATA now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(kib) * 1024
