"""Properties of torch on a machine: its version, the GPUs that it sees, and its backends."""

from __future__ import annotations

import msgspec

from provision.fact import Fact, decode


class Torch(msgspec.Struct, frozen=True, omit_defaults=True):
    """version: None if torch cannot be imported. gpus: None if torch cannot use GPUs."""

    version: str | None = None
    why_absent: str | None = None
    cuda: str | None = None  # the CUDA release that it was built for
    gpus: int | None = None
    why_no_gpus: str | None = None
    hidden_by: str | None = None  # CUDA_VISIBLE_DEVICES, which hides GPUs from torch and not from NVML
    backends: list[str] = []


def command(python: str) -> list[str]:
    """Needs our environment on the node."""
    return [python, "-m", "provision.facts._torch"]


def parse(stdout: str) -> Torch:
    """What torch said of itself. Raises ValueError."""
    torch = decode(stdout, Torch)
    if (torch.version is None) == (torch.why_absent is None):
        raise ValueError("it names neither a version nor why there is none.")
    return torch


TORCH = Fact("torch", command, parse, timeout_s=120)  # 4 s here; a cold NFS home can take a minute
