"""Properties of torch on a machine: its version, the GPUs that it sees, and its backends."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery, decode_last_line


class Torch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties of torch on a machine."""

    version: str | None = None
    """None if torch cannot be imported."""
    why_absent: str | None = None
    cuda: str | None = None
    """The CUDA release that torch was built for."""
    gpus: int | None = None
    """None if torch cannot use GPUs."""
    why_no_gpus: str | None = None
    hidden_by: str | None = None
    """The value of CUDA_VISIBLE_DEVICES, which hides GPUs from torch but not from NVML."""
    backends: list[str] = []


def build_command(python: str) -> list[str]:
    """The command that prints the properties of torch. It needs the environment of shardlab on the node."""
    return [python, "-m", "provision.facts._torch"]


def parse(stdout: str) -> Torch:
    """The properties of torch that the command printed as JSON. Raises ValueError."""
    torch_properties = decode_last_line(stdout, Torch)
    if (torch_properties.version is None) == (torch_properties.why_absent is None):
        raise ValueError("it names neither a version nor why there is none.")
    return torch_properties


# Importing torch takes 4 s from a local disk, and up to a minute from NFS.
TORCH = FactQuery("torch", build_command, parse, timeout_s=120)
