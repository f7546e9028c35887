"""Batches on their way to the device, so that the host can make the next one meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device. On a GPU the copy is only ordered: before what the current stream does next."""
    import torch

    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    with torch.cuda.device(device):  # a new thread's device is GPU 0, where pinning memory would make a context
        return tensor.pin_memory().to(device, non_blocking=True)
