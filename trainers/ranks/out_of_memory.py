"""Recognizes errors that were caused by a lack of memory, on a GPU or on the host."""

from __future__ import annotations

import re
import sys

# Parts of the messages of out-of-memory errors without an exception type of their own. Such errors come from torch on a CPU,
# and from the libraries that torch uses on a GPU.
OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory", "CUDA error: out of memory", "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'", "Failed to CUDA calloc",  # from NCCL, which does not use torch's allocator
)  # fmt: skip
# Errors with several possible causes. They count as out of memory if less than HARDLY_FREE of the GPU's memory is free.
POSSIBLE_OUT_OF_MEMORY_MESSAGES = ("CUBLAS_STATUS_NOT_INITIALIZED", "unable to find an engine to execute this computation")
HARDLY_FREE = 0.05  # share of the GPU's memory
# What torch's allocators say in their errors: sizes with their unit, such as `2.50 GiB`.
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_REQUESTED = re.compile(rf"ried to allocate {_SIZE}")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_UNIT_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error was caused by a lack of memory, on a GPU or on the host."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(message_part in message for message_part in OUT_OF_MEMORY_MESSAGES) or (
        any(message_part in message for message_part in POSSIBLE_OUT_OF_MEMORY_MESSAGES) and _read_free_share() < HARDLY_FREE
    )


def read_memory_sizes(error: BaseException) -> dict[str, int]:
    """The memory of this rank when memory ran out, in bytes, as far as the error says it: `requested_bytes`, and on a GPU
    `allocated_bytes` and `reserved_bytes`, which contains the allocated memory."""

    def read_size(pattern: re.Pattern[str]) -> int | None:
        match = pattern.search(str(error))
        return None if match is None else round(float(match[1]) * _UNIT_BYTES[match[2]])

    allocated_bytes, unallocated_bytes = read_size(_ALLOCATED), read_size(_UNALLOCATED)
    is_reserved_known = allocated_bytes is not None and unallocated_bytes is not None
    bytes_by_kind = {
        "requested_bytes": read_size(_REQUESTED),
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": (allocated_bytes or 0) + (unallocated_bytes or 0) if is_reserved_known else None,
    }
    return {name: size for name, size in bytes_by_kind.items() if size is not None}


def _read_free_share() -> float:
    """The free share of the GPU's memory, from 0 to 1. It is 1 if there is no GPU, or if the free memory cannot be read."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 1.0
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except RuntimeError:  # after a fatal CUDA error, every CUDA call fails
        return 1.0
    return free_bytes / total_bytes
