"""The drivers that each generation of NVIDIA GPUs needs, and the builds of the pinned torch that support it.

No build is chosen here: a node gets pip's default or that of the wheelhouse (provision/operations/environment.py).

Sources:
- device ids: the PCI ID database (pci.ids)
- open and proprietary kernel modules: NVIDIA's driver installation guide, "Kernel Modules", and NVIDIA's announcement that
  Grace Hopper and Blackwell have only open modules
- the last driver branch of a generation: the NixOS wiki, which is a second-hand source
- the oldest driver for a CUDA release: NVIDIA's "CUDA Compatibility", "Minor Version Compatibility"
- the generations that torch supports: PyTorch's RELEASE.md, "CUDA Support Matrix" for 2.12 and 2.13 (pull requests 182849
  and 187075)
- the build of torch that pip installs by default: PyTorch's issues 178665 and 190355
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

TORCH_VERSION = "2.13.0"  # the pinned version of torch, which the table GENERATIONS_BY_BUILD describes
LONG_SUPPORT_BRANCH = 580  # the driver branch with long support: it supports all generations from Maxwell to Blackwell
USUAL_CUDA = "13.0"  # the CUDA release of the torch that pip installs by default
OLDEST_DRIVER = {"12": 525, "13": 580}  # the oldest driver branch that supports a major release of CUDA


class GpuGeneration(msgspec.Struct, frozen=True):
    """A generation of NVIDIA GPUs."""

    name: str
    ids: tuple[tuple[int, int], ...]
    """Ranges of PCI device ids, both ends included."""
    open_modules: Literal["never", "may", "must"]
    """Whether the driver's open kernel modules can never, may or must be used for these GPUs."""
    last_branch: int | None = None
    """The last branch of the driver that supports these GPUs; None if no branch has dropped them yet."""


GENERATIONS = (
    GpuGeneration("Kepler", ((0x0FC0, 0x103F), (0x1180, 0x11FF), (0x1280, 0x12BF)), "never", 470),
    GpuGeneration("Maxwell", ((0x1340, 0x14FF), (0x1610, 0x16FF), (0x1740, 0x17FF)), "never", 580),
    GpuGeneration("Pascal", ((0x15F0, 0x15FF), (0x1B00, 0x1D7F)), "never", 580),
    GpuGeneration("Volta", ((0x1D80, 0x1DFF),), "never", 580),
    GpuGeneration("Turing", ((0x1E00, 0x1FFF), (0x2180, 0x21FF)), "may"),
    GpuGeneration("Ampere", ((0x2080, 0x20FF), (0x2200, 0x22FF), (0x2400, 0x25FF)), "may"),
    GpuGeneration("Hopper", ((0x2300, 0x2341), (0x2349, 0x23FF)), "may"),
    GpuGeneration("Grace Hopper", ((0x2342, 0x2348),), "must"),
    GpuGeneration("Ada", ((0x2680, 0x28FF),), "may"),
    GpuGeneration("Blackwell", ((0x2900, 0x2FFF), (0x3180, 0x31FF)), "must"),
)

_ARM_GENERATIONS = frozenset({"Ampere", "Hopper", "Grace Hopper"})
# The generations that every build of torch for x86_64 supports. Ada (compute capability 8.9) runs code that is built for 8.6.
_COMMON_GENERATIONS = frozenset({"Turing", "Ampere", "Ada", "Hopper"})
GENERATIONS_BY_BUILD = {  # the generations that a build of torch supports, by processor architecture and CUDA release
    ("x86_64", "12.6"): _COMMON_GENERATIONS | {"Maxwell", "Pascal", "Volta"},
    ("x86_64", "13.0"): _COMMON_GENERATIONS | {"Blackwell"},
    ("x86_64", "13.2"): _COMMON_GENERATIONS | {"Blackwell"},
    ("aarch64", "12.6"): _ARM_GENERATIONS,
    ("aarch64", "13.0"): _ARM_GENERATIONS | {"Blackwell"},
    ("aarch64", "13.2"): _ARM_GENERATIONS | {"Blackwell"},
}


def find_generation(device_id: int) -> GpuGeneration | None:
    """The generation of the GPU with this PCI device id; None if the id is not in the table."""
    return next(
        (generation for generation in GENERATIONS if any(first <= device_id <= last for first, last in generation.ids)), None
    )


def choose_kernel_module_kind(generations: Sequence[GpuGeneration]) -> Literal["open", "proprietary"]:
    """The kind of kernel modules to install for all these GPUs.

    One kind is enough, because no build of torch supports both GPUs that need open modules and GPUs that cannot use them.
    """
    return "proprietary" if any(generation.open_modules == "never" for generation in generations) else "open"


def find_oldest_driver_branch(cuda_release: str) -> int:
    """The oldest driver branch for a torch built for this CUDA release. Raises KeyError for an unknown release."""
    return OLDEST_DRIVER[cuda_release.partition(".")[0]]


def choose_driver_branch(generations: Sequence[GpuGeneration], cuda_release: str, installed: int | None) -> int:
    """The driver branch to use: the branch `installed` if it supports all GPUs, otherwise the branch with long support.

    installed: None if no driver is installed.
    """
    last_branches = [generation.last_branch for generation in generations if generation.last_branch is not None]
    if installed is not None and find_oldest_driver_branch(cuda_release) <= installed <= min(last_branches, default=installed):
        return installed
    return LONG_SUPPORT_BRANCH


def explain_unsupported(generations: Sequence[GpuGeneration], node_arch: str, cuda: str) -> str | None:
    """Why a torch built for this CUDA release cannot use these GPUs, and which build can; None if this torch can use them."""
    supported_names = GENERATIONS_BY_BUILD.get((node_arch, cuda))
    if supported_names is None:
        return (
            f"shardlab knows no torch {TORCH_VERSION} for CUDA {cuda} on {node_arch}; it knows the builds for CUDA "
            + ", ".join(f"{release} on {arch}" for arch, release in GENERATIONS_BY_BUILD)
        )
    unsupported_names = sorted({generation.name for generation in generations if generation.name not in supported_names})
    if not unsupported_names:
        return None
    other_releases = [
        release
        for (arch, release), generation_names in GENERATIONS_BY_BUILD.items()
        if arch == node_arch and all(generation.name in generation_names for generation in generations)
    ]
    build_advice = (
        f"set environment.wheelhouse to a folder with wheels of its build for CUDA {other_releases[0]}"
        if other_releases
        else "no other build supports them: remove the nodes with these GPUs from the cluster file"
    )
    return f"torch {TORCH_VERSION} for CUDA {cuda} does not support {' and '.join(unsupported_names)} GPUs; {build_advice}"
