"""Tells the steps of a Trainer of Lightning to shardlab: `Trainer(..., callbacks=[LightningStepCallback()])`.

Outside of a run of shardlab, nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback

from shardlab import steps


class LightningStepCallback(Callback):  # type: ignore[misc]  # lightning is not installed where types are checked
    """Reports each step of the optimizer, with the mean loss over the batches of the step."""

    def __init__(self, tokens: Callable[[Any], int] | None = None, checksum_after: int | None = None) -> None:
        """tokens: counts the tokens of a batch, which Lightning does not know. checksum_after: compare the weights before the
        first step and after this one; None: not at all."""
        self._count_tokens, self._checksum_after = tokens, checksum_after
        self._last_step, self._loss_sum, self._token_count = 0, None, 0

    _loss_sum: Any

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Write the first checksums, unless the training resumes from a checkpoint."""
        self._last_step = trainer.global_step
        if self._checksum_after is not None and trainer.global_step == 0:
            steps.checksum(trainer.model, optimizer=trainer.optimizers[0], step=0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report the step if the optimizer made one in this batch: with accumulation, it makes one after several batches."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:  # Lightning has divided it by the number of batches of a step
            self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
        self._token_count += self._count_tokens(batch) if self._count_tokens is not None else 0
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        tokens = self._token_count if self._count_tokens is not None else None
        steps.report(step=self._last_step, loss=self._loss_sum, tokens=tokens)
        self._loss_sum, self._token_count = None, 0
        if self._last_step == self._checksum_after:
            steps.checksum(trainer.model, optimizer=trainer.optimizers[0])
