"""The variables of tools that would otherwise cache files in the user's home folder."""

from __future__ import annotations

from pathlib import PurePosixPath


def variables(cache: PurePosixPath) -> list[tuple[str, str]]:
    """The name and the value of each variable. cache: the folder in which the tools keep their files instead."""
    return [
        ("PIP_CACHE_DIR", f"{cache}/pip"),
        ("XDG_CACHE_HOME", str(cache)),
        ("TORCHINDUCTOR_CACHE_DIR", f"{cache}/inductor"),
        ("TRITON_CACHE_DIR", f"{cache}/triton"),
        ("TORCH_EXTENSIONS_DIR", f"{cache}/torch_extensions"),
        ("CUDA_CACHE_PATH", f"{cache}/cuda"),  # kernels that the driver compiled; else in ~/.nv
    ]
