"""Copies batches to the device asynchronously, so that the host can prepare the next batch in the meantime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device, as a tensor. On a GPU the copy is asynchronous, on the current stream."""
    host_tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return host_tensor.to(device)
    with torch.cuda.device(device):  # a new thread would use GPU 0, and pinning memory would create a CUDA context there
        return host_tensor.pin_memory().to(device, non_blocking=True)


class SideStream:
    """A CUDA stream for copies: batches are copied while the GPU computes, and a step waits only for its own batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def use_stream(self) -> Iterator[None]:
        """In the `with` block, copies of this thread use this stream."""
        if self._stream is None:
            yield
            return
        # The device is set too: when the context of torch.cuda.stream ends, it restores the previous device of the thread. In a
        # new thread, the previous device is GPU 0, which would then get a CUDA context.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def record_copies(self) -> torch.cuda.Event | None:
        """An event that completes after all copies that were queued so far; None on a CPU, where copies are synchronous."""
        return None if self._stream is None else self._stream.record_event()

    def await_copies(self, tensors: Iterable[torch.Tensor], copy_event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for copies, and keep the memory of the tensors until this stream has used them.

        copy_event: the event from `copy_event`. tensors: the copied tensors.
        """
        if copy_event is None:
            return
        current_stream = torch.cuda.current_stream(self._device)
        current_stream.wait_event(copy_event)
        for tensor in tensors:
            tensor.record_stream(current_stream)
