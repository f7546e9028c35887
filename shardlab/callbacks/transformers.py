"""Tells the steps of transformers' Trainer to shardlab: `Trainer(..., callbacks=[TrainerStepCallback()])`.

Outside of a run of shardlab, nothing happens.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from shardlab import steps


class TrainerStepCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Reports each step of a Trainer.

    The loss is the one that the Trainer logs, which is the mean since its last log: with logging_steps=1, that of each step.
    Tokens are those that the Trainer counts with include_num_input_tokens_seen, of all ranks, so that rank 0 reports them all.
    """

    def __init__(self, checksum_after: int | None = None) -> None:
        """checksum_after: compare the weights before the first step and after this one; None: not at all."""
        self._checksum_after, self._reported_tokens = checksum_after, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Write the first checksums, unless the training resumes from a checkpoint."""
        self._reported_tokens = state.num_input_tokens_seen
        if self._checksum_after is not None and state.global_step == 0:
            steps.checksum(objects["model"], optimizer=objects["optimizer"], step=0)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Write the second checksums, while the gradients are still there."""
        if state.global_step + 1 == self._checksum_after:
            steps.checksum(objects["model"], optimizer=objects["optimizer"], step=self._checksum_after)

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Report a step whose loss the Trainer does not log."""
        if not control.should_log:
            self._report(args, state, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
        """Report a step with its loss. The logs of evaluations and of the end have no loss of a step."""
        if "loss" in (logs or {}):
            self._report(args, state, logs["loss"])

    def _report(self, args: Any, state: Any, loss: float | None) -> None:
        tokens = None
        if state.num_input_tokens_seen:
            tokens = state.num_input_tokens_seen - self._reported_tokens if args.process_index == 0 else 0
            self._reported_tokens = state.num_input_tokens_seen
        steps.report(step=state.global_step, loss=loss, tokens=tokens)
