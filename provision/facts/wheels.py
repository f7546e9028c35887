"""The CUDA release for which the wheel of torch in a node's folder of wheels is built."""

from __future__ import annotations

import re

from provision import gpu_generations
from provision.fact import FactQuery

_TORCH_WHEEL = re.compile(r"^torch-[0-9.]+(?:\+([a-z]+)([0-9]*))?-", re.MULTILINE)


def parse(stdout: str) -> str | None:
    """The CUDA release, such as 13.0; None if torch is built without CUDA. Raises ValueError unless one torch is found."""
    torch_builds = set(_TORCH_WHEEL.findall(stdout))
    if len(torch_builds) != 1:
        raise ValueError(f"it holds {len(torch_builds)} builds of torch. Allowed: one.")
    build_kind, cuda_digits = torch_builds.pop()
    if not build_kind:
        return gpu_generations.USUAL_CUDA
    return f"{cuda_digits[:-1]}.{cuda_digits[-1]}" if build_kind == "cu" and len(cuda_digits) > 1 else None


def make_torch_build_query(wheel_folder: str) -> FactQuery[str | None]:
    """The fact for a node on which pip installs all packages from `wheel_folder`."""
    return FactQuery(f"torch in {wheel_folder}", lambda python: ["ls", "-1", "--", wheel_folder], parse, timeout_s=30)
