"""Loss scaling keeps fp16 gradients from vanishing: it scales losses up and gradients back, and skips steps that overflow.

This module has its own scaler, because torch's two scalers do not work with every strategy. `torch.amp.GradScaler` sums its
overflow flag only over the mesh of a DTensor, so each stage of a pipeline would decide alone whether to skip a step.
`ShardedGradScaler` is for FSDP1 only. And pipelines call backward inside a schedule, where neither scaler can be used. The rule
and its numbers are the same as in torch's GradScaler (Micikevicius et al., Mixed Precision Training, 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

START_SCALE = 65536.0
GROWTH, GROWTH_INTERVAL = 2.0, 2000  # after INTERVAL steps in a row without an overflow, the scale is multiplied by GROWTH
BACKOFF = 0.5  # after each step with an overflow, the scale is multiplied by BACKOFF


class LossScaler:
    """The loss scale of one rank. It is a power of two, so that scaling does not round.

    Ranks that call `decide_step` with the same overflow flag have the same scale. skipped: number of steps that were skipped
    because of an overflow.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale, self.skipped_steps = START_SCALE, 0
        self.overflowed = torch.zeros((), device=device)  # above 0 if a gradient of this rank in the step is not finite
        self._good_steps = 0

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The scaled loss, from which backward starts."""
        return loss * self.scale

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Scale the gradients of a whole step back, in place, and record whether any of them is infinite or NaN."""
        self.overflowed.zero_()
        gradients_by_device: dict[
            torch.device, list[torch.Tensor]
        ] = {}  # offloaded gradients are on the CPU, others on the GPU
        for gradient in gradients:
            local_gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            gradients_by_device.setdefault(local_gradient.device, []).append(local_gradient)
        for device, device_gradients in gradients_by_device.items():
            overflow_flag = torch.zeros((), device=device)
            inverse_scale = torch.full((), 1 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(device_gradients, overflow_flag, inverse_scale)
            self.overflowed += overflow_flag.to(self.overflowed.device)

    def decide_step(self, overflowed: torch.Tensor) -> bool:
        """Whether to make the optimizer step. Also sets the scale of the next step.

        overflowed: the overflow flag summed over all ranks, 0-dim. The host waits for the device here, once per step, as with
        torch's scaler.
        """
        if overflowed.item() > 0:
            self.scale *= BACKOFF
            self.skipped_steps += 1
            self._good_steps = 0
            return False
        self._good_steps += 1
        if self._good_steps == GROWTH_INTERVAL:
            self.scale *= GROWTH
            self._good_steps = 0
        return True

    def collect_numbers(self) -> dict[str, float]:
        """The state of the scaler for a checkpoint, as numbers by name."""
        return {"loss_scale": self.scale, "skipped_steps": float(self.skipped_steps), "made_in_a_row": float(self._good_steps)}

    def load_numbers(self, numbers: dict[str, float]) -> None:
        """Set the state of the scaler from the numbers of a checkpoint. If the checkpoint has no such numbers, because its run
        had another precision, the defaults are used."""
        self.scale = numbers.get("loss_scale", START_SCALE)
        self.skipped_steps, self._good_steps = int(numbers.get("skipped_steps", 0)), int(numbers.get("made_in_a_row", 0))

    def read_effective_settings(self) -> dict[str, Any]:
        """For `knobs.effective` of result.json: the scale of the next step, the number of skipped steps (warm-up included)."""
        return {"loss_scale": self.scale, "skipped_steps": self.skipped_steps}
