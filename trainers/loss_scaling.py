"""Keep fp16 gradients from vanishing: losses are scaled up, gradients scaled back, and a step that overflowed is skipped.

One scaler of our own rather than torch's three: `torch.amp.GradScaler` sums its sign up over a DTensor's own mesh and over
nothing else, so that stages of a pipeline would decide each for itself; `ShardedGradScaler` knows FSDP1's shards; and
pipelines call backward themselves, inside a schedule that has no place for either. The rule and its numbers are those of
torch's GradScaler (Micikevicius et al., Mixed Precision Training, 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trainers.communication import Term
from trainers.precision import scales_loss

if TYPE_CHECKING:
    import torch

START = 65536.0
GROWTH, INTERVAL = 2.0, 2000  # times, after so many steps in a row that did not overflow
BACKOFF = 0.5  # times, after each step that did
SIGN_BYTES = 4  # the sign that a gradient overflowed, as ranks add it up


class LossScaler:
    """The scale of one rank, a power of two: to scale by it loses no digit. Equal on all ranks that settle alike.

    skipped: steps that overflowed and were not made.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.scale, self.skipped = START, 0
        self.overflowed = torch.zeros((), device=device)  # above 0 where this rank's gradient of the step is not finite
        self._made_in_a_row = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that backward starts from."""
        return loss * self.scale

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Scale the gradients of a whole step back, in place, and note whether one of them is infinite or no number."""
        import torch
        from torch.distributed.tensor import DTensor

        self.overflowed.zero_()
        by_device: dict[torch.device, list[torch.Tensor]] = {}  # offloaded ones lie elsewhere than the rank computes
        for gradient in gradients:
            there = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            by_device.setdefault(there.device, []).append(there)
        for device, lying_there in by_device.items():
            found = torch.zeros((), device=device)
            back = torch.full((), 1 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(lying_there, found, back)
            self.overflowed += found.to(self.overflowed.device)

    def settle(self, overflowed: torch.Tensor) -> bool:
        """Whether the step is to be made, given the sign of all ranks together; the next step's scale follows from it.

        The host waits for the device here, once a step, as it does in torch's scaler.
        """
        if overflowed.item() > 0:
            self.scale *= BACKOFF
            self.skipped += 1
            self._made_in_a_row = 0
            return False
        self._made_in_a_row += 1
        if self._made_in_a_row == INTERVAL:
            self.scale *= GROWTH
            self._made_in_a_row = 0
        return True

    def numbers(self) -> dict[str, float]:
        """What a run goes on from."""
        return {"loss_scale": self.scale, "skipped_steps": float(self.skipped), "made_in_a_row": float(self._made_in_a_row)}

    def restored(self, numbers: dict[str, float]) -> None:
        """Go on from those of a run that has them; one in another precision has none."""
        self.scale = numbers.get("loss_scale", START)
        self.skipped, self._made_in_a_row = int(numbers.get("skipped_steps", 0)), int(numbers.get("made_in_a_row", 0))

    def effective(self) -> dict[str, Any]:
        """What stands in a run's knobs: the scale that the next step would have, and the steps skipped, warm-up included."""
        return {"loss_scale": self.scale, "skipped_steps": self.skipped}


def sign(precision: str, ranks: int) -> list[Term]:
    """What the ranks that hold different gradients send to skip a step together; nothing if the loss is not scaled."""
    if not scales_loss(precision):
        return []
    return [Term("the sign that a gradient overflowed, once a step", "all_reduce", SIGN_BYTES, ranks)]
