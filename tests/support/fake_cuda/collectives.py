"""Replaces NCCL on fake GPUs by gloo, which can use the memory of fake GPUs because it is host memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_library = torch.library.Library("c10d", "IMPL")


def install() -> None:
    for whole in torch._C._dispatch_get_all_op_names():
        if whole.startswith("c10d::") and not whole.startswith("c10d::monitored_barrier_"):
            short, _, overload = whole.removeprefix("c10d::").partition(".")
            by_gloo = _by_gloo(getattr(getattr(torch.ops.c10d, short), overload or "default"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns because these kernels replace its own kernels, which need NCCL
                _library.impl(whole.removeprefix("c10d::"), by_gloo, "CUDA", allow_override=True)
    start = dist.init_process_group

    def init_process_group(
        backend: str | None = None, *args: Any, device_id: torch.device | None = None, **kwargs: Any
    ) -> None:
        assert backend != "nccl" or device_id is None or device_id.type == "cuda"
        start("gloo" if backend == "nccl" else backend, *args, **kwargs)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group
    dist.is_nccl_available = distributed_c10d.is_nccl_available = lambda: True


def _by_gloo(operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        found = operator(*map(_host, args), **{name: _host(value) for name, value in kwargs.items()})
        if isinstance(found, tuple) and len(found) == 2:  # (tensors, work): torch expects the caller's own tensors
            return next(value for value in args if isinstance(value, list | tuple | torch.Tensor)), found[1]
        return found

    return run


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.ops.fake_cuda.host_view(value)
    return [_host(one) for one in value] if isinstance(value, list | tuple) else value
