"""The environment variables that move the caches of pip, torch, Triton and CUDA out of the user's home folder."""

from __future__ import annotations

from pathlib import PurePosixPath


def list_cache_variables(cache_folder: PurePosixPath) -> list[tuple[str, str]]:
    """The name and value of each environment variable that moves a cache. cache_folder: the folder into which all caches are
    moved."""
    return [
        ("PIP_CACHE_DIR", f"{cache_folder}/pip"),
        ("XDG_CACHE_HOME", str(cache_folder)),
        ("TORCHINDUCTOR_CACHE_DIR", f"{cache_folder}/inductor"),
        ("TRITON_CACHE_DIR", f"{cache_folder}/triton"),
        ("TORCH_EXTENSIONS_DIR", f"{cache_folder}/torch_extensions"),
        ("CUDA_CACHE_PATH", f"{cache_folder}/cuda"),  # the cache of kernels that the driver compiled; by default it is in ~/.nv
    ]
