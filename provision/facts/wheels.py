"""The CUDA release for which the wheel of torch in a node's folder of wheels is built."""

from __future__ import annotations

import re

from provision import gpu_generations
from provision.fact import Fact

_TORCH = re.compile(r"^torch-[0-9.]+(?:\+([a-z]+)([0-9]*))?-", re.MULTILINE)


def parse(stdout: str) -> str | None:
    """The CUDA release, such as 13.0; None if torch is built without CUDA. Raises ValueError unless one torch is found."""
    builds = set(_TORCH.findall(stdout))
    if len(builds) != 1:
        raise ValueError(f"it holds {len(builds)} builds of torch. Allowed: one.")
    kind, digits = builds.pop()
    if not kind:
        return gpu_generations.USUAL_CUDA
    return f"{digits[:-1]}.{digits[-1]}" if kind == "cu" and len(digits) > 1 else None


def torch_build_fact(folder: str) -> Fact[str | None]:
    """The fact for a node on which pip installs all packages from `folder`."""
    return Fact(f"torch in {folder}", lambda python: ["ls", "-1", "--", folder], parse, timeout_s=30)
