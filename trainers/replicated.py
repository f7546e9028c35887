"""The step of every strategy in which each rank runs the whole model on its own slice of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardlab.cell import Cell
from trainers import optimization, precision, switches
from trainers.instruments.timing import BACKWARD, FORWARD
from trainers.strategy import Engine

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.instruments.timing import Clock
    from trainers.ranks import Ranks
    from trainers.state_parts import State
    from trainers.workload import Batch, Task


class ReplicatedEngine(Engine):
    """Accumulates over micro-batches; a strategy says how one pass is wrapped and when ranks exchange gradients."""

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module) -> None:
        self.cell, self.task = cell, task
        self.device = ranks.device
        self.data_rank, self.data_ranks = ranks.rank, ranks.world_size
        self.model = model
        self.optimizer = optimization.make(cell.optimizer, model.parameters())
        self._output_dtype: torch.dtype | None = None

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of one forward and backward; ranks exchange gradients in the last one of a step."""
        raise NotImplementedError

    def computing(self) -> AbstractContextManager[object]:
        """The context of a forward pass that gives the cell's precision."""
        return precision.autocast(self.cell.precision, self.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a pass, whose loss is its share of the step's, to those before it."""
        loss.backward()  # type: ignore[no-untyped-call]

    def forward_backward(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        import torch

        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(micro_batches, start=1):
            with self.one_pass(last=index == len(micro_batches)):
                with self.computing():
                    outputs = self.task.outputs(self.model, batch)
                    loss = self.task.criterion(outputs, batch.targets) / len(micro_batches)
                clock.mark(FORWARD)
                self.backward(loss)
                clock.mark(BACKWARD)
            self._output_dtype = outputs.dtype
            total += loss.detach()
        return total

    def update(self) -> None:
        if self.cell.max_grad_norm is not None:
            norm = switches.gradient_norm(self.model.parameters())
            switches.clip(self.model.parameters(), self.cell.max_grad_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_norm(self) -> float:
        return float(switches.gradient_norm(self.model.parameters()))

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        return switches.whole_parameters(self.model)

    def state(self) -> State:
        from trainers import state_parts

        named = [(switches.plain_name(name), parameter) for name, parameter in self.model.named_parameters()]
        return {**state_parts.of_parameters(named, self.optimizer), **state_parts.of_buffers(self.model)}

    def make_room(self, numbers: dict[str, float]) -> None:
        from trainers import state_parts

        state_parts.make_room(self.optimizer)

    def effective(self) -> dict[str, Any]:
        weights = {p.dtype for p in self.model.parameters()}
        state = {
            value.dtype
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if hasattr(value, "dtype") and value.dim() > 0  # step counters are 0-dim
        }
        group = self.optimizer.param_groups[0]
        return {
            "optimizer": type(self.optimizer).__name__,
            "weight_decay": group["weight_decay"],
            "last_lr": group["lr"],
            "weights_dtype": _names(weights),
            "optimizer_state_dtype": _names(state),
            "output_dtype": _names({self._output_dtype} - {None}),
            **switches.effective(self.model),
            "max_grad_norm": self.cell.max_grad_norm,
            "tf32": precision.tf32_in_effect(self.device),
        }


def _names(dtypes: set[Any]) -> str | None:
    return ", ".join(sorted(precision.dtype_name(dtype) for dtype in dtypes)) or None
