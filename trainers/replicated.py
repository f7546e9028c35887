"""The base of engines whose ranks each run the whole model on their own slice of the batch, such as the engines of DDP and
FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from shardlab.matrix.cell import Cell
from trainers import dtypes, model_options
from trainers.engine import Engine
from trainers.instruments.timing import BACKWARD, FORWARD
from trainers.model import optimization, precision
from trainers.model.cast_weights import cast_weights
from trainers.model.loss_scaling import LossScaler

if TYPE_CHECKING:
    from trainers.instruments.timing import Clock
    from trainers.ranks.ranks import Ranks
    from trainers.task import Batch, Task


class ReplicatedEngine(Engine):
    """Accumulates gradients over micro-batches. Subclasses define when and how ranks exchange gradients (`one_pass`)."""

    casts_itself = False  # whether a library (FSDP, DeepSpeed) casts the weights to the precision of the cell

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module) -> None:
        self.cell, self.task = cell, task
        self.device = ranks.device
        self.data_rank, self.data_ranks = ranks.rank, ranks.world_size
        self.model = model
        self.optimizer = optimization.make_optimizer(cell.optimizer, model.parameters())
        self.scaler = LossScaler(ranks.device) if precision.scales_loss(cell.precision) else None
        self._output_dtype: torch.dtype | None = None

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of one forward and backward pass. last: whether this is the last pass of a step, in which ranks exchange
        gradients."""
        raise NotImplementedError

    def cast_context(self) -> AbstractContextManager[object]:
        """The context of forward and backward passes: in it, the model's weights are cast to the cell's precision."""
        return cast_weights(self.model, None if self.casts_itself else dtypes.cast_dtype(self.cell.precision))

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass: torch's autocast, if the cell's precision uses autocast."""
        return dtypes.make_autocast_context(self.cell.precision, self.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward and accumulate the gradients. loss: already divided by the number of micro-batches."""
        (loss if self.scaler is None else self.scaler.scale_loss(loss)).backward()  # type: ignore[no-untyped-call]

    def unscale(self) -> None:
        """Divide the gradients of a step by the loss scale, after all ranks have exchanged gradients."""
        if self.scaler is not None:
            self.scaler.unscale(p.grad for p in self.model.parameters() if p.grad is not None)

    def sum_overflow(self, overflowed: torch.Tensor) -> torch.Tensor:
        """The overflow flag (0-dim), summed over ranks with different gradients.

        This default is for engines in which every rank has the same, whole gradient, so it returns the flag unchanged.
        """
        return overflowed

    def may_step(self) -> bool:
        """Whether to apply the gradients of the step. A collective, with the same answer on all ranks."""
        return self.scaler is None or self.scaler.decide_step(self.sum_overflow(self.scaler.overflowed))

    def forward_backward(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        total_loss = torch.zeros((), device=self.device)
        for index, micro_batch in enumerate(micro_batches, start=1):
            batch = self._cast_inputs(micro_batch)
            with self.one_pass(last=index == len(micro_batches)), self.cast_context():
                with self.autocast():
                    outputs = self.task.outputs(self.model, batch)
                    loss = self.task.criterion(outputs, batch.targets) / len(micro_batches)
                clock.mark(FORWARD)
                self.backward(loss)
                clock.mark(BACKWARD)
            self._output_dtype = outputs.dtype
            total_loss += loss.detach()
        self.unscale()
        return total_loss

    def _cast_inputs(self, batch: Batch) -> Batch:
        return msgspec.structs.replace(batch, inputs=dtypes.cast_inputs(batch.inputs, self.cell.precision))

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), self.cast_context(), self.autocast():
            outputs = self.task.outputs(self.model, self._cast_inputs(batch))
            loss_and_correct = self.task.criterion(outputs, batch.targets), self.task.correct(outputs, batch.targets)
        model_options.free_gathered_parameters(self.model)
        return loss_and_correct

    def update(self) -> None:
        if self.may_step():
            if self.cell.max_grad_norm is not None:
                self.clip(self.cell.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def clip(self, max_norm: float) -> None:
        """Scale the gradients by max_norm / norm if this ratio is below 1. norm: the L2 norm of all gradients."""
        model_options.clip_gradients(
            self.model.parameters(), max_norm, model_options.compute_gradient_norm(self.model.parameters())
        )

    def start_loss_scale(self, scale: float) -> None:
        if self.scaler is not None:
            self.scaler.scale = scale

    def collect_numbers(self) -> dict[str, float]:
        return {} if self.scaler is None else self.scaler.collect_numbers()

    def finish_loading(self, numbers: dict[str, float]) -> None:
        if self.scaler is not None:
            self.scaler.load_numbers(numbers)

    def effective(self) -> dict[str, Any]:
        weight_dtypes = {p.dtype for p in self.model.parameters()}
        state_dtypes = {
            value.dtype
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if hasattr(value, "dtype") and value.dim() > 0  # not the 0-dim step counters
        }
        parameter_group = self.optimizer.param_groups[0]
        return {
            "optimizer": type(self.optimizer).__name__,
            "weight_decay": parameter_group["weight_decay"],
            "last_lr": parameter_group["lr"],
            "weights_dtype": _join_dtype_names(weight_dtypes),
            "optimizer_state_dtype": _join_dtype_names(state_dtypes),
            "output_dtype": _join_dtype_names({self._output_dtype} - {None}),
            **model_options.count_changed_blocks(self.model),
            "max_grad_norm": self.cell.max_grad_norm,
            "tf32": dtypes.read_tf32_setting(self.device),
            **(self.scaler.read_effective_settings() if self.scaler is not None else {}),
        }


def _join_dtype_names(kinds_of_tensors: set[Any]) -> str | None:
    return ", ".join(sorted(dtypes.dtype_name(dtype) for dtype in kinds_of_tensors)) or None
