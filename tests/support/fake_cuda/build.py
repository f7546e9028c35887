"""Compiles the C++ part of the fake GPUs, once for each version of torch and of the C++ source."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parents[2] / ".pytest_cache" / "fake_cuda"


def why_not() -> str | None:
    """Why the library cannot be built on this machine; None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this is the CUDA build of torch, which registers the real CUDA first; for these tests: make test TORCH=cpu"
    return None if shutil.which("g++") else "g++ is not installed"


def _torch() -> Path:
    """The folder of the package torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def library() -> Path:
    """The path of the library. It is built if necessary, which takes about 15 s on one processor.

    Raises CalledProcessError if g++ fails.
    """
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for source in sources:
        digest.update(source.read_bytes())
    made = BUILT / f"fake_cuda-{digest.hexdigest()[:16]}.so"
    if not made.exists():
        torch = _torch()
        BUILT.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_suffix(f".{os.getpid()}")
        command = [
            "g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-I{torch}/include",
            f"-I{torch}/include/torch/csrc/api/include", HERE / "fake_cuda.cpp", "-o", unfinished, f"-L{torch}/lib", "-lc10",
            "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{torch}/lib",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        unfinished.replace(made)  # an atomic rename: another test worker may build the same file
    return made
