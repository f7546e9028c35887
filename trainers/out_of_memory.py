"""Tells errors that mean a lack of memory, on a GPU or on the host, from other errors."""

from __future__ import annotations

import sys

# How torch says on a CPU, and how libraries below it say on a GPU, what has no exception type of its own.
OUT_OF_MEMORY = (
    "can't allocate memory", "CUDA error: out of memory", "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'", "Failed to CUDA calloc",  # NCCL, which takes its buffers beside torch's allocator
)  # fmt: skip
# Errors with several possible causes. They count as out of memory if less than HARDLY_FREE of the GPU's memory is free.
MAYBE_OUT_OF_MEMORY = ("CUBLAS_STATUS_NOT_INITIALIZED", "unable to find an engine to execute this computation")
HARDLY_FREE = 0.05  # of the GPU's memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    return any(words in said for words in OUT_OF_MEMORY) or (
        any(words in said for words in MAYBE_OUT_OF_MEMORY) and _free_share() < HARDLY_FREE
    )


def _free_share() -> float:
    """The share of the GPU's memory that is free, 0 to 1. 1 if there is no GPU, or if the free memory cannot be read."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 1.0
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # after a fatal CUDA error, every CUDA call fails
        return 1.0
    return free / total
