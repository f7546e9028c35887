"""Fake GPUs: makes the CPU build of torch behave as if the machine had CUDA devices.

`install` must be called before the first import of torch. A C++ library (see `build`) gives torch a CUDA device whose memory is
host memory, counted and limited per GPU, and whose operators are the kernels of the CPU. The Python part of torch.cuda is not
changed; `device`, `streams` and `collectives` replace the functions that it calls. NCCL is replaced by gloo on the same memory.

Fake GPUs can test whether our code uses torch.cuda correctly: devices, copies, pinned memory, counters of the allocator, out of
memory, waits of the host, and that every strategy does the same work on `cuda:N`. They cannot test features that need hardware:
NCCL (communicators, order, hangs), concurrent streams and their races, the kernels of cuBLAS, cuDNN and flash attention and
their rounding, Triton, traces of CUPTI, NVML, fragmentation of the allocator, and time.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

NAME = "NVIDIA H100 80GB HBM3"


def install(library: Path, *, devices: int = 1, memory_gib: float = 80.0, name: str = NAME) -> None:
    """Give this process fake GPUs. Call this before torch is imported.

    library: the C++ library from `build.library`. devices: the number of GPUs; CUDA_VISIBLE_DEVICES may reduce it.
    memory_gib: the memory of each GPU. name: the model of the GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = min(devices, len([one for one in visible.split(",") if one.strip()]))
    os.environ["FAKE_CUDA_DEVICES"] = str(devices)
    # This must run before torch is imported, because torch checks only once whether CUDA is available.
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
