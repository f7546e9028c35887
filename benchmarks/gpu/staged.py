"""Collectives for several ranks on one GPU, which NCCL does not support.

Tensors are copied to the host, gloo runs the collective, and the results are copied back to the GPU. The ranks compute on the
GPU, with its kernels and its allocator. Only the communication differs from NCCL, and each record says so.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d

# The operators whose end this rank does not wait for. A send ends only when the receiving rank receives, and the receiving rank
# may wait for later work of this rank first.
SENDS = ("send",)
_library = torch.library.Library("c10d", "IMPL")


def install() -> None:
    """From now on, process groups of this process with the backend nccl use gloo instead, and gloo accepts CUDA tensors."""
    known = {"allow_override": True} if "allow_override" in inspect.signature(_library.impl).parameters else {}
    for whole in torch._C._dispatch_get_all_op_names():
        if whole.startswith("c10d::") and not whole.startswith("c10d::monitored_barrier_"):
            name = whole.removeprefix("c10d::")
            short, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.c10d, short), overload or "default")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that its own kernels are replaced
                _library.impl(name, _through_host(operator, waits=short not in SENDS), "CUDA", **known)
    start = dist.init_process_group

    def init_process_group(backend: Any = None, *args: Any, device_id: torch.device | None = None, **kwargs: Any) -> None:
        start("gloo" if backend == "nccl" else backend, *args, **kwargs)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group


def _done(tensors: list[torch.Tensor]) -> Any:
    """A finished Work (torch's handle of a collective) whose future contains these tensors.

    DDP reads the result of its all-reduce from this future.
    """
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


def _through_host(operator: Callable[..., Any], *, waits: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def host(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                copies.append((value, value.cpu()))
                return copies[-1][1]
            return [host(one) for one in value] if isinstance(value, list | tuple) else value

        found = operator(*map(host, args), **{name: host(value) for name, value in kwargs.items()})
        work = found[1] if isinstance(found, tuple) else found
        if waits and hasattr(work, "wait"):
            work.wait()
            # Results are the first arguments, so they are copied last: a result may share memory with an input, and the copy of
            # the input must not overwrite the result.
            for there, here in reversed(copies):
                there.detach().copy_(here)
            # A new Work instead of gloo's Work, because a second wait() on gloo's Work of a receive would wait for another
            # message.
            work = _done([there for there, _ in copies])
        # `found` is (tensors, work): return the CUDA tensors that the caller passed in instead of the copies on the host
        if isinstance(found, tuple):
            return next(value for value in args if isinstance(value, list | tuple | torch.Tensor)), work
        return work

    return run
