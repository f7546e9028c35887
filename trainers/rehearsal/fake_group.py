"""Lets one process act as one rank of many: in its process group, collectives exchange nothing and end at once.

The group is torch's backend `fake`. This module adds what engines need: results of collectives for which engines wait, and the
shapes that pipeline stages would send each other. Only this module uses the private parts of torch that are needed for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _flat_param
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining._utils import InferenceMode, _StageBackwardMeta, _StageForwardMeta, extract_tensor_meta
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.optim import optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainers.parallel.schedule import Stage
from trainers.ranks.ranks import Ranks
from trainers.rehearsal.fake_tensors import RealIntegers, use_real_tensors


class FakeRanks(Ranks):
    """The ranks of a run as seen by one process, although the processes of the other ranks do not exist."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.local_rank, self.world_size = rank, 0, world_size
        self.trains_on, self.backend, self.device = "cpu", "fake", torch.device("cpu")

    def make_mesh(self, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
        with use_real_tensors():
            return super().make_mesh(shape, names)

    def all_gather_numbers(self, numbers: Sequence[float]) -> np.ndarray:
        """Return the result as if every rank had passed the same numbers as this rank."""
        return np.tile(np.array(numbers, dtype=np.float64), (self.world_size, 1))

    def barrier(self) -> None:
        """Returns at once, because there are no other ranks to wait for."""


@contextmanager
def use_fake_group(rank: int, world_size: int) -> Iterator[FakeRanks]:
    """In the `with` block, this process acts as rank number `rank` of `world_size` ranks."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with (
            _replace_attribute(dist, "all_reduce", _fake_all_reduce),
            _replace_attribute(dist, "new_group", _make_fake_group),
            # DistributedDataParallel's check of shapes reads, in C++, memory that fake tensors do not have.
            _replace_attribute(DistributedDataParallel, "_pre_forward", _run_fake_pre_forward),
            # FSDP1 takes a tensor with the address 0 for a tensor without memory, and all fake tensors have this address.
            _replace_attribute(_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0),
            _replace_attribute(_flat_param, "_same_storage", _share_storage),
            _replace_attribute(_fsdp_param, "_chunk_with_empty", _LazyChunks),
            # An optimizer without fused kernels updates weights together on a GPU, but not on a CPU.
            _replace_attribute(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
            _replace_attribute(optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, FakeTensor]),
            _replace_attribute(distributed, "_verify_param_shape_across_processes", lambda *_: None),
        ):
            yield FakeRanks(rank, world_size)
    finally:
        dist.destroy_process_group()


class _LazyChunks(Sequence[torch.Tensor]):
    """The chunks into which FSDP2 cuts a parameter, one for each rank. A chunk is made only when it is used: FSDP2 uses only
    two of them, and with hundreds of ranks, making all chunks took most of the time."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._chunk_count, self._dim = tensor, num_chunks, dim
        self._chunk_size = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._chunk_count

    def __getitem__(self, index: Any) -> Any:
        chunk_begin = index * self._chunk_size
        chunk_size = min(self._chunk_size, self._tensor.size(self._dim) - chunk_begin)
        return self._tensor.narrow(self._dim, chunk_begin, chunk_size) if chunk_size > 0 else self._tensor.new_empty(0)


def _share_storage(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors, or the local parts of DTensors, share memory."""
    left_storage, right_storage = (getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in (left, right))
    return bool(left_storage._cdata == right_storage._cdata)


_real_all_reduce, _real_new_group = dist.all_reduce, dist.new_group


class _FinishedWork:
    """The handle of a collective that has already ended."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        self._results = results

    def wait(self) -> None:
        """Returns at once, because the collective has already ended."""

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future with the result of the collective. The futures of the backend `fake` have no result."""
        future = torch.futures.Future[list[torch.Tensor]]()
        future.set_result(self._results)
        return future


def _fake_all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> _FinishedWork | None:
    _real_all_reduce(tensor, *args, **kwargs)
    return _FinishedWork([tensor]) if async_op else None


def _make_fake_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
    """Replaces `dist.new_group`: makes a group with the backend `fake`, whichever backend the caller asks for."""
    return _real_new_group(*args, **kwargs)


def register_averaging_hook(model: object) -> None:
    """Register a communication hook that averages gradients with a DistributedDataParallel that has no hook. Without a hook,
    its C++ part would wait for a result that the backend `fake` does not give."""
    if isinstance(model, DistributedDataParallel) and not model._comm_hooks:
        model.register_comm_hook(None, _average_bucket)


def _average_bucket(_, bucket):  # type: ignore[no-untyped-def]  # DDP wants its own classes as annotations or none
    return _average_over_ranks(bucket.buffer().div_(dist.get_world_size()))


def _average_over_ranks(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    _fake_all_reduce(buffer)
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(buffer)
    return future


_real_pre_forward = DistributedDataParallel._pre_forward


def _run_fake_pre_forward(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    # In this call, the C++ part of DistributedDataParallel compares the order of gradients among ranks, with real integers.
    with RealIntegers():  # type: ignore[no-untyped-call]
        return _real_pre_forward(model, *args, **kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def infer_neighbour_shapes(make_hidden: Callable[[], torch.Tensor]) -> Iterator[None]:
    """In the `with` block, a pipeline stage learns the shapes of the tensors that it exchanges with stages on other ranks from
    `hidden()`, which returns the hidden state of a micro-batch between two blocks."""

    def receive_shapes(stage: Stage, source_stage: int) -> Any:
        hidden = make_hidden()
        if source_stage < stage.stage_index:
            return _StageForwardMeta(forward_metas=(extract_tensor_meta(hidden.requires_grad_()),))
        return _StageBackwardMeta(backward_metas=(extract_tensor_meta(hidden),))

    def infer_shapes(schedule: _PipelineSchedule, stages: Sequence[Stage], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.DYNAMIC

    with (
        _replace_attribute(Stage, "_recv_meta", receive_shapes),
        _replace_attribute(Stage, "_send_meta", lambda *_: None),
        # The stages vote whether to infer shapes. torch 2.14 refuses to infer them with the backend `fake`.
        _replace_attribute(_PipelineSchedule, "_warmup_p2p", infer_shapes),
    ):
        yield


@contextmanager
def _replace_attribute(owner: Any, name: str, substitute: object) -> Iterator[None]:
    """In the `with` block, replace the attribute `name` of a module or class by `substitute`."""
    original_attribute = owner.__dict__.get(name)
    setattr(owner, name, substitute)
    try:
        yield
    finally:
        if original_attribute is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original_attribute)
