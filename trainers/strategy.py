"""The interfaces of a strategy: its entry on the menu (readable without torch), its engine, and its servers."""

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

    precisions: the precisions that it supports.
    refuse: returns why a cell cannot run, as a sentence, or None. It gets the resolved cell, whose options are within their
    bounds, and needs no torch (`Workload.refuse` says how a sentence names an option).
    build: makes the engine on a rank that trains; it imports torch itself.
    options: the options of the strategy.
    degrees: the dimensions of its mesh: some of dp, tp and pp.
    switches: which of activation_checkpointing, compile and max_grad_norm it supports.
    servers: whether it has parameter servers in addition to the ranks that train.
    unprovable: returns why a cell cannot be compared with one process although it is meant to do the same work, as a sentence,
    or None. Such a cell is ranked, with a remark.
    other_work: returns why a cell by design does other work than one process (it averages parameters every few steps, it
    approximates gradients), as a sentence, or None. Such a cell is never ranked.
    communication_period: after how many optimizer steps the communication of a cell repeats. `Engine.theory` gives the mean per
    step over the period, and the proof counts a whole period. None: the bytes cannot be counted, because other threads than the
    training thread start the collectives.
    cuts: which of parameter, gradient and optimizer_state it shards over the data-parallel ranks of a group, according to
    textbooks; None if it divides the model in another way.
    server: makes what a parameter server runs. The last ranks are the servers.
    tolerates_lost_ranks: whether a run continues if a rank that trains is killed, except rank 0, which writes the result.
    no_checkpoints: why a run cannot be saved and resumed; empty if it can.
    reasons: why it does not support a precision, by precision.
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
        """Why the strategy does not support a precision, as a sentence, or None."""
        if precision in self.precisions:
            return None
        why = f": {self.reasons[precision]}" if precision in self.reasons else ""
        return f"{self.name} cannot honour {precision}{why}. Allowed: {', '.join(self.precisions)}."


class Engine(ABC):
    """A model distributed over ranks, and how to make one optimizer step with it. The loop uses only this interface.

    The global batch is divided into `data_ranks` equal slices, and this rank trains on slice `data_rank`. If every rank has its
    own data, these are the world size and the rank; ranks that share one model share a slice.
    The loop sets the learning rate in `optimizer.param_groups` before every step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data_rank: int
    data_ranks: int
    joins = False  # whether the rest of the epoch is trained too, in a last step in which not all ranks have data

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        """Accumulate the gradients of one step and return this rank's mean loss (0-dim, detached, on the device).

        The mean of what the ranks return is the mean over the global batch.
        """

    @abstractmethod
    def update(self) -> None:
        """Clip the gradients to the cell's max_grad_norm, if it has one, apply them, and clear them."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, number of right predictions) of a micro-batch, both 0-dim on the device. Its shape is that of training.

        A collective, with the model in evaluation mode. Ranks that share a model get the same values.
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
        """All terms of the communication that this rank sends per step by theory, for what the strategy really does; the mean
        over `Strategy.communication_period` steps."""

    @abstractmethod
    def textbook_bytes(self) -> float | None:
        """The textbook figure for the bytes of one rank and step (2 psi for data parallel, 3 psi for ZeRO-3 and FSDP; psi: the
        bytes of all gradients); None if textbooks give no figure."""

    @abstractmethod
    def effective(self) -> dict[str, Any]:
        """The settings that took effect, read from the wrapped model after its last step, not from the cell."""

    def join(self) -> AbstractContextManager[object]:
        """The context of the last step of an engine that `joins`. In it a rank without data does not train."""
        raise NotImplementedError

    def keeps(self) -> dict[str, list[torch.Tensor]]:
        """The tensors that now hold this rank's parameters, their gradients, the optimizer's state and, if it updates copies of
        the parameters, these copies (`master_parameter`). Called between passes, never during a pass."""
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
        """This rank's parts of parameters, buffers and optimizer state, by names that are unique in the whole model. A
        collective, between steps. To load a checkpoint, write into the parts and then call `restored`."""

    def numbers(self) -> dict[str, float]:
        """Other state for a checkpoint: plain numbers, equal on all ranks."""
        return {}

    @abstractmethod
    def make_room(self, numbers: dict[str, float]) -> None:
        """Called before a checkpoint with these numbers is loaded: allocate the state that only first steps would allocate."""

    def restored(self, numbers: dict[str, float]) -> None:  # noqa: B027 - most have nothing to do
        """Called after the parts of `state` were written: update everything that depends on them. A collective."""

    def reordered(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """For a tensor of `state` that was gathered from all ranks to this shape and flattened: the indices of its elements in
        the order and shape of `Task.model`. None if order and shape are the same."""
        return None

    def company(self, ranks: Ranks) -> Company:
        """The ranks that wait for each other before the timed steps and gather the result."""
        return ranks

    def start_loss_scale(self, scale: float) -> None:  # noqa: B027 - only fp16 has one
        """If the precision is fp16, scale losses by `scale`, a power of two, from the next step on."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Called after the result is written: this rank makes no more steps."""

    def parameters(self) -> int:
        """The trainable parameters of the whole model, tied weights once."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


class Server(ABC):
    """A parameter server: a rank that holds parameters for the ranks that train. It has no data and records no steps."""

    @abstractmethod
    def serve(self) -> None:
        """Serve until every rank that trains has closed its engine or is lost."""

    @abstractmethod
    def theory(self) -> list[Term]:
        """The communication that this rank sends by theory while each rank that trains makes one step."""
