"""Asynchronous copies of batches to the device: meanwhile the host prepares the next batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device. On a GPU the copy is asynchronous, on the current stream."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    with torch.cuda.device(device):  # a new thread's device is GPU 0, where pinning memory would make a context
        return tensor.pin_memory().to(device, non_blocking=True)


class SideStream:
    """A CUDA stream for copies: batches are copied while the GPU computes, and a step waits only for its own batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """In the `with` block, copies of this thread use this stream."""
        if self._stream is None:
            yield
            return
        # Sets the device too: at its end, torch.cuda.stream restores the previous device; GPU 0 would get a CUDA context then.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def copied(self) -> torch.cuda.Event | None:
        """An event after all copies that were queued so far; None on a CPU, where copies are synchronous."""
        return None if self._stream is None else self._stream.record_event()

    def take(self, tensors: Iterable[torch.Tensor], copied: torch.cuda.Event | None) -> None:
        """Make the current stream wait for the copies, and keep the memory of the tensors until this stream has used it."""
        if copied is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(current)
