"""Computes the memory of each device over the profiled steps, from the allocations that the profiler recorded.

torch.profiler records allocations if `profile_memory=True`. The numbers come from PyTorch's allocators, so they do not include
memory that libraries such as NCCL allocate themselves. On a GPU, the numbers include all tensors. On a CPU, they include only
memory that was allocated since the start of the recording.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo
from collect.traces.details import MemoryEvents
from collect.traces.trace import Trace

MOST_POINTS = 300  # the most points of the curve of a device
CPU = "cpu"
# Number of a type of device in c10/core/DeviceType.h -> its name. ROCm uses the number of CUDA.
_DEVICES = {0: CPU, 1: "cuda", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuseone"}


class MemoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """The memory of a device at one moment."""

    at_ns: int
    """Ns since the start of the first profiled step."""
    allocated: int
    """Bytes that the allocator had allocated at this moment; None if unknown."""
    reserved: int | None
    """Bytes that the allocator had reserved at this moment; None if unknown."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one device over the profiled steps, in bytes."""

    device: str
    """Its name, such as cpu or cuda:0."""
    start_bytes: int
    """Allocated at the start of the first step."""
    end_bytes: int
    """Allocated at the end of the last step."""
    peak_bytes: int
    """The most that was allocated."""
    peak_reserved_bytes: int | None
    """The most that the allocator had reserved from the device; None on a CPU, whose allocator reserves nothing."""
    points: list[MemoryPoint]
    """The curve, at most MOST_POINTS points; each is the point with the most memory of its part of the curve."""


def measure_memory(trace: Trace) -> list[MemoryUse]:
    """The memory of each device, sorted by device; empty if the trace records no allocations in the profiled steps."""
    begin, _ = _profiled_range(trace)
    uses = []
    for device, before, inside in select_device_events(trace):
        if (use := _measure_device(trace.details.memory, before, inside, begin, device)) is not None:
            uses.append(use)
    return uses


def select_device_events(trace: Trace) -> list[tuple[str, NDArray[np.intp], NDArray[np.intp]]]:
    """For each device, sorted: (its name, its last event before the profiled steps, its events within them, sorted by time).

    Events are indexes in `trace.details.memory`. The array of the event before is empty if no event is before the steps.
    """
    events = trace.details.memory
    begin, end = _profiled_range(trace)
    devices = []
    for kind, number in sorted(set(zip(events.device_type.tolist(), events.device.tolist(), strict=True))):
        rows = np.flatnonzero((events.device_type == kind) & (events.device == number))
        rows = rows[np.argsort(events.at_ns[rows], kind="stable")]
        before, inside = rows[events.at_ns[rows] < begin], rows[(events.at_ns[rows] >= begin) & (events.at_ns[rows] < end)]
        devices.append((_device_name(kind, number), before[-1:], inside))
    return devices


def _profiled_range(trace: Trace) -> tuple[int, int]:
    """Returns (start of the first profiled step, end of the last) in ns; without steps, the time of all allocations."""
    steps, moments = gloo.find_steps(trace), trace.details.memory.at_ns
    if steps.any():
        return int(trace.start_ns[steps].min()), int(trace.end_ns[steps].max())
    return (int(moments.min()), int(moments.max()) + 1) if len(moments) else (0, 0)


def _device_name(kind: int, number: int) -> str:
    name = _DEVICES.get(kind, f"device type {kind}")
    return name if name == CPU or number < 0 else f"{name}:{number}"


def _measure_device(
    events: MemoryEvents, before: NDArray[np.intp], inside: NDArray[np.intp], begin: int, device: str
) -> MemoryUse | None:
    """The memory of one device from `begin` on, in ns. None if nothing is known about this time.

    before, inside: as in `select_device_events`.
    """
    rows = np.concatenate([before, inside])
    if not len(rows):
        return None
    # If no event is before `begin`, the memory at `begin` is the memory after the first event minus the size of this event.
    allocated, reserved, moments = events.allocated[rows], events.reserved[rows], np.maximum(0, events.at_ns[rows] - begin)
    start = int(allocated[0]) if len(before) else max(0, int(allocated[0] - events.bytes[rows[0]]))
    # Some versions and allocators write 0 for the reserved memory, which cannot be less than the allocated memory.
    reserved_known = device != CPU and bool((reserved >= allocated).all())
    return MemoryUse(
        device=device,
        start_bytes=start,
        end_bytes=int(allocated[-1]),
        peak_bytes=max(start, int(allocated.max())),
        peak_reserved_bytes=int(reserved.max()) if reserved_known else None,
        points=[
            *([] if len(before) else [MemoryPoint(0, start, None)]),
            *(
                MemoryPoint(int(moments[index]), int(allocated[index]), int(reserved[index]) if reserved_known else None)
                for index in _select_curve_points(allocated)
            ),
        ],
    )


def _select_curve_points(allocated: NDArray[np.int64]) -> list[int]:
    """The indexes of the points that the curve keeps, at most MOST_POINTS - 1: the greatest point of each section of the
    curve."""
    count = min(len(allocated), MOST_POINTS - 1)
    bounds = [len(allocated) * section // count for section in range(count + 1)]
    return [first + int(allocated[first:last].argmax()) for first, last in pairwise(bounds)]
