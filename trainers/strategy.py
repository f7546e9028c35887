"""What a strategy says of itself (readable without torch) and what it makes of a model (its engine)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec

from shardlab.cell import Cell
from shardlab.registry import Option

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.communication import Term
    from trainers.instruments.timing import Clock
    from trainers.ranks import Company, Ranks
    from trainers.saving.state_parts import State
    from trainers.workload import Batch, Task


class Strategy(msgspec.Struct, frozen=True):
    """A variant on the menu.

    precisions: those that it honours. options: its knobs. refuse: why a cell cannot be had, as a sentence, or None;
    it sees the resolved cell and needs no torch. build: makes the engine on a rank; imports torch itself.
    degrees: the dimensions of its mesh, of dp, tp and pp. switches: which of activation_checkpointing, compile and
    max_grad_norm it honours. servers: whether it has parameter-server ranks besides those that train. cuts: which of
    parameter, gradient and optimizer_state textbooks have it cut over the data-parallel ranks of a group, None where it cuts
    the model in another way. server: makes what a parameter-server rank runs; the last ranks are servers, and `build` is for
    the others. tolerates_lost_ranks: a run goes on when a rank that trains is killed, rank 0 (which writes the result) and
    servers apart. reasons: why it leaves a precision out, by precision. no_checkpoints: why a run cannot be saved and gone on
    with, or nothing.

    unprovable: why a cell cannot be held against one process although it is meant to do the same work, as a sentence, or
    None; such a cell is ranked, with a remark. other_work: why a cell does other work than one process by design (it averages
    parameters every few steps, it approximates gradients), as a sentence, or None; such a cell is never ranked.
    communication_period: the optimizer steps after which the communication of a cell repeats; `Engine.theory` states the mean
    of a step over them, and the proof counts a whole period. None: what it sends cannot be counted, as other threads than the
    one that trains start its collectives.
    """

    name: str
    summary: str
    precisions: tuple[str, ...]
    refuse: Callable[[Cell], str | None]
    build: Callable[[Cell, Task, Ranks], Engine]
    options: tuple[Option, ...] = ()
    degrees: tuple[str, ...] = ("dp",)
    switches: tuple[str, ...] = ()
    servers: bool = False
    unprovable: Callable[[Cell], str | None] = lambda _: None
    other_work: Callable[[Cell], str | None] = lambda _: None
    communication_period: Callable[[Cell], int | None] = lambda _: 1
    cuts: tuple[str, ...] | None = None
    server: Callable[[Cell, Task, Ranks], Server] | None = None
    tolerates_lost_ranks: bool = False
    no_checkpoints: str = ""
    reasons: dict[str, str] = {}

    def refuse_precision(self, precision: str) -> str | None:
        """Why a precision cannot be had, as a sentence, or None."""
        if precision in self.precisions:
            return None
        why = f": {self.reasons[precision]}" if precision in self.reasons else ""
        return f"{self.name} cannot honour {precision}{why}. Allowed: {', '.join(self.precisions)}."


class Engine(ABC):
    """A model spread over ranks, and how one optimizer step is made with it. The loop knows nothing else.

    The global batch is cut into `data_ranks` equal slices and this rank trains on slice `data_rank`: where every rank
    has its own data these are the world size and the rank; ranks that share one model share a slice.
    The loop sets the learning rate in `optimizer.param_groups` before every step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data_rank: int
    data_ranks: int
    joins = False  # whether what is left of the one epoch is trained too, in a last step for which not all ranks have data

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        """Accumulate the gradients of one step and return this rank's mean loss (0-dim, detached, on the device).

        The mean of what the ranks return is the mean over the global batch.
        """

    @abstractmethod
    def update(self) -> None:
        """Scale the gradients down to the cell's max_grad_norm where it has one, apply them, and clear them."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, right predictions), both 0-dim on the device, of a micro-batch of the shape that it trains on.

        All ranks call it together, with the model in evaluation mode; ranks that share a model get the same.
        """

    @abstractmethod
    def gradient_norm(self) -> float:
        """The L2 norm of the whole model's gradient between forward_backward and update; all ranks call it together."""

    @abstractmethod
    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """The whole model's parameters by the names that `Task.model` gives them, in fp32 on the CPU, tied ones once.

        All ranks call it together; rank 0 has them all, other ranks may give none.
        """

    @abstractmethod
    def theory(self) -> list[Term]:
        """What this rank has to send in one step by theory, for what the strategy really does, every term of it; the mean
        over `Strategy.communication_period` steps."""

    @abstractmethod
    def textbook_bytes(self) -> float | None:
        """What textbooks give for one rank and step (2 psi for data parallel, 3 psi for ZeRO-3 and FSDP, psi the bytes of
        all gradients); None where they give no such figure."""

    @abstractmethod
    def effective(self) -> dict[str, Any]:
        """Which knobs took effect, read from the wrapped model after its last step and not from what was asked."""

    def join(self) -> AbstractContextManager[object]:
        """The context of such a step; a rank without data calls neither forward_backward nor update in it."""
        raise NotImplementedError

    def keeps(self) -> dict[str, list[torch.Tensor]]:
        """The tensors that now hold this rank's parameters, their gradients, the optimizer's state and, where it updates
        copies of the parameters, these (`master_parameter`); asked between passes, never in one."""
        parameters = list(self.model.parameters())
        updated = [p for group in self.optimizer.param_groups for p in group["params"]]
        entries = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return {
            "parameter": parameters,
            "gradient": [p.grad for p in (*parameters, *updated) if p.grad is not None],
            "optimizer_state": [value for value in entries if hasattr(value, "untyped_storage")],
            "master_parameter": updated,  # only those whose memory is no parameter's
        }

    @abstractmethod
    def state(self) -> State:
        """What lies in this rank's memory of parameters, buffers and optimizer state, by names that tell the whole model's
        tensors apart. All ranks call it together, between steps: parts that are written into are what training goes on
        with, once `restored` was called."""

    def numbers(self) -> dict[str, float]:
        """What else training goes on from: plain numbers, equal on all ranks."""
        return {}

    @abstractmethod
    def make_room(self, numbers: dict[str, float]) -> None:
        """Before a state that these numbers belong to is read: have what only first steps would make."""

    def restored(self, numbers: dict[str, float]) -> None:  # noqa: B027 - most have nothing to do
        """The parts of `state` were written into; make the rest agree with them. All ranks call it together."""

    def reordered(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """Of a tensor of `state`, put together from all ranks to this shape and laid out flat: the numbers of its elements
        as `Task.model` has them, in the shape that they have there. None where nothing differs."""
        return None

    def company(self, ranks: Ranks) -> Company:
        """Those who wait for each other before the timed steps and bring the result together."""
        return ranks

    def start_loss_scale(self, scale: float) -> None:  # noqa: B027 - only fp16 has one
        """Scale losses by so much from the next step on, where the precision is fp16; a power of two."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Called when the result is written: this rank makes no step any more."""

    def parameters(self) -> int:
        """The trainable parameters of the whole model, tied weights once."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


class Server(ABC):
    """What a rank does that holds parameters for the ranks that train; it has no data and records no steps."""

    @abstractmethod
    def serve(self) -> None:
        """Serve until every rank that trains has closed its engine or is lost."""

    @abstractmethod
    def theory(self) -> list[Term]:
        """What this rank has to send by theory while each rank that trains makes one step."""
