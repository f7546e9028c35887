"""The all-reduces that `provision` measured on a cluster. The inventory keeps them, and the planner fits its links to them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]


class AllReduceTime(msgspec.Struct, frozen=True):
    """The times of all-reduces of tensors of one size. The time of an all-reduce is the time of its slowest rank."""

    bytes: Annotated[int, msgspec.Meta(gt=0)]
    """Size of the tensor that each rank contributes."""
    seconds: Positive
    """Median duration of one all-reduce over the iterations."""
    fastest_s: Positive
    slowest_s: Positive
    bus_bandwidth_gb_per_s: Positive
    """The bus bandwidth in 1e9 bytes per second, as nccl-tests defines it: 2(n-1)/n x `bytes` / `seconds`, with n ranks."""


class MeasuredAllReduce(msgspec.Struct, frozen=True):
    """The times of all-reduces of tensors of several sizes between the same ranks."""

    nodes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """The nodes of the ranks: one node that has all ranks, or several nodes that have one rank each."""
    ranks: Annotated[int, msgspec.Meta(ge=2)]
    backend: Literal["gloo", "nccl"]
    """gloo: tensors in host memory, sent over TCP. nccl: tensors on GPUs."""
    gpu: str | None
    """The name in NVML of the GPU model that all ranks have; None: the tensors were in host memory."""
    measured: str
    """The time of the measurement (ISO 8601, UTC)."""
    times: Annotated[tuple[AllReduceTime, ...], msgspec.Meta(min_length=1)]
    """The times of the all-reduces, from the smallest size to the largest."""


def compute_bus_bandwidth(rank_count: int, tensor_bytes: int, time_s: float) -> float:
    """The bus bandwidth of an all-reduce in bytes per second. Values for different numbers of ranks can be compared.

    tensor_bytes: the size of the tensor of one rank. time_s: the seconds of one all-reduce.
    """
    return 2 * (rank_count - 1) / rank_count * tensor_bytes / time_s
