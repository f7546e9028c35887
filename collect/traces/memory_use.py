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

MOST_CURVE_POINTS = 300  # the most points of the curve of a device
CPU_DEVICE = "cpu"
# Number of a type of device in c10/core/DeviceType.h -> its name. ROCm uses the number of CUDA.
_DEVICE_TYPE_NAMES = {0: CPU_DEVICE, 1: "cuda", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuseone"}


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
    profiled_start_ns, _ = _find_profiled_range(trace)
    memory_uses = []
    for device, rows_before, rows_inside in select_device_events(trace):
        if (use := _measure_device(trace.details.memory, rows_before, rows_inside, profiled_start_ns, device)) is not None:
            memory_uses.append(use)
    return memory_uses


def select_device_events(trace: Trace) -> list[tuple[str, NDArray[np.intp], NDArray[np.intp]]]:
    """For each device, sorted: (its name, its last event before the profiled steps, its events within them, sorted by time).

    Events are indexes in `trace.details.memory`. The array of the event before is empty if no event is before the steps.
    """
    memory_events = trace.details.memory
    begin_ns, end_ns = _find_profiled_range(trace)
    events_by_device = []
    for device_type, device_number in sorted(
        set(zip(memory_events.device_type.tolist(), memory_events.device_number.tolist(), strict=True))
    ):
        device_rows = np.flatnonzero(
            (memory_events.device_type == device_type) & (memory_events.device_number == device_number)
        )
        device_rows = device_rows[np.argsort(memory_events.at_ns[device_rows], kind="stable")]
        rows_before = device_rows[memory_events.at_ns[device_rows] < begin_ns]
        rows_inside = device_rows[(memory_events.at_ns[device_rows] >= begin_ns) & (memory_events.at_ns[device_rows] < end_ns)]
        events_by_device.append((_make_device_name(device_type, device_number), rows_before[-1:], rows_inside))
    return events_by_device


def _find_profiled_range(trace: Trace) -> tuple[int, int]:
    """Returns (start of the first profiled step, end of the last) in ns; without steps, the time of all allocations."""
    is_step, moments_ns = gloo.find_steps(trace), trace.details.memory.at_ns
    if is_step.any():
        return int(trace.start_ns[is_step].min()), int(trace.end_ns[is_step].max())
    return (int(moments_ns.min()), int(moments_ns.max()) + 1) if len(moments_ns) else (0, 0)


def _make_device_name(device_type: int, device_number: int) -> str:
    type_name = _DEVICE_TYPE_NAMES.get(device_type, f"device type {device_type}")
    return type_name if type_name == CPU_DEVICE or device_number < 0 else f"{type_name}:{device_number}"


def _measure_device(
    events: MemoryEvents, rows_before: NDArray[np.intp], rows_inside: NDArray[np.intp], profiled_start_ns: int, device: str
) -> MemoryUse | None:
    """The memory of one device from `profiled_start_ns` on, in ns. None if nothing is known about this time.

    rows_before, rows_inside: as in `select_device_events`.
    """
    device_rows = np.concatenate([rows_before, rows_inside])
    if not len(device_rows):
        return None
    # If no event is before `begin`, the memory at `begin` is the memory after the first event minus the size of this event.
    allocated_bytes = events.allocated_bytes[device_rows]
    reserved_bytes = events.reserved_bytes[device_rows]
    moments_ns = np.maximum(0, events.at_ns[device_rows] - profiled_start_ns)
    start = int(allocated_bytes[0]) if len(rows_before) else max(0, int(allocated_bytes[0] - events.size_bytes[device_rows[0]]))
    # Some versions and allocators write 0 for the reserved memory, which cannot be less than the allocated memory.
    reserved_known = device != CPU_DEVICE and bool((reserved_bytes >= allocated_bytes).all())
    return MemoryUse(
        device=device,
        start_bytes=start,
        end_bytes=int(allocated_bytes[-1]),
        peak_bytes=max(start, int(allocated_bytes.max())),
        peak_reserved_bytes=int(reserved_bytes.max()) if reserved_known else None,
        points=[
            *([] if len(rows_before) else [MemoryPoint(0, start, None)]),
            *(
                MemoryPoint(
                    int(moments_ns[index]), int(allocated_bytes[index]), int(reserved_bytes[index]) if reserved_known else None
                )
                for index in _select_curve_points(allocated_bytes)
            ),
        ],
    )


def _select_curve_points(allocated_bytes: NDArray[np.int64]) -> list[int]:
    """The indexes of the points that the curve keeps, at most MOST_POINTS - 1: the greatest point of each section of the
    curve."""
    point_count = min(len(allocated_bytes), MOST_CURVE_POINTS - 1)
    section_bounds = [len(allocated_bytes) * section // point_count for section in range(point_count + 1)]
    return [
        section_start + int(allocated_bytes[section_start:section_end].argmax())
        for section_start, section_end in pairwise(section_bounds)
    ]
