"""Copies losses from the GPU to the host asynchronously, so that no step waits for a loss."""

from __future__ import annotations

import torch

SLOTS = 3  # losses that may be unread: of the current step, of the step before, and one spare


class LateLoss:
    """Pinned host tensors for losses. A copy is queued right after its step; reading it does not wait for the next step."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._slots = [torch.empty((), pin_memory=True) for _ in range(SLOTS)] if on_gpu else []
        self._next = 0

    def of(self, loss: torch.Tensor) -> torch.Tensor:
        """Start to copy a step's loss (0-dim, fp32) to the host; returns the host tensor.

        The tensor is valid after the last event of the step, for SLOTS - 1 further steps.
        """
        if not self._slots:
            return loss
        slot = self._slots[self._next % SLOTS]
        self._next += 1
        return slot.copy_(loss, non_blocking=True)
