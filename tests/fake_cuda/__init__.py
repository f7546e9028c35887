"""Fake GPUs: makes torch's CPU build behave as if it had CUDA devices.

`install` goes before the first import of torch. A C++ library (see `build`) gives torch a CUDA device whose memory is host
memory, counted and limited per GPU, and whose operators are the CPU's kernels. The Python part of torch.cuda stays torch's own;
`device`, `streams` and `collectives` stand in for the functions below it. NCCL becomes gloo on the same memory.

Fake GPUs can test whether our code uses torch.cuda correctly: devices, copies, pinned memory, counters of the allocator, out of
memory, waits of the host, and that every strategy does the same work on `cuda:N`. They cannot test what needs hardware:
NCCL (communicators, order, hangs), concurrent streams and their races, which kernels of cuBLAS, cuDNN and
flash attention run and how they round, Triton, CUPTI's traces, NVML, fragmentation of the allocator, and time.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

NAME = "NVIDIA H100 80GB HBM3"


def install(library: Path, *, devices: int = 1, memory_gib: float = 80.0, name: str = NAME) -> None:
    """Give this process fake GPUs; torch must not have been imported. devices: of them CUDA_VISIBLE_DEVICES may leave fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = min(devices, len([one for one in visible.split(",") if one.strip()]))
    os.environ["FAKE_CUDA_DEVICES"] = str(devices)
    # Before torch, which asks once whether there is CUDA and keeps the answer.
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    ctypes.CDLL(str(Path(spec.submodule_search_locations[0]) / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch

    torch.ops.load_library(str(library))
    from fake_cuda import collectives, device, streams

    device.install(devices, int(memory_gib * 2**30), name)
    streams.install()
    collectives.install()
