"""The interfaces of what a strategy builds: the engine of a rank that trains, in four parts, and a parameter server.

The loop trains with a `Trained`, the proof makes steps and compares parameters with a `Proven`, the result and the memory
instruments account with an `Accounted`, and checkpoints save a `Saved`. An `Engine` is all four.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainers import model_options
from trainers.checkpointing import state_parts

if TYPE_CHECKING:
    from trainers.checkpointing.state_parts import State
    from trainers.communication import Term
    from trainers.instruments.timing import Clock
    from trainers.ranks import Peers, Ranks
    from trainers.task import Batch


class Trained(ABC):
    """A model distributed over ranks, and how to make one optimizer step with it.

    The loop sets the learning rate in `optimizer.param_groups` before every step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data_ranks: int
    """Number of equal slices of the global batch: the world size, or less if ranks share one model and so a slice."""
    data_rank: int
    """The slice on which this rank trains."""
    joins = False
    """Whether the rest of the epoch is trained too, in a last step in which not all ranks have data."""

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

    def join(self) -> AbstractContextManager[object]:
        """The context of the last step of an engine that `joins`. In it a rank without data does not train."""
        raise NotImplementedError

    def finish(self) -> None:  # noqa: B027 - most have nothing to do
        """Called after the update of the last step, as a part of this step: bring the parameters into their final state.

        A strategy that averages parameters every few steps averages here. The last validation, the last checkpoint, the result
        and the proof read the parameters afterwards. A collective.
        """

    def company(self, ranks: Ranks) -> Peers:
        """The ranks that wait for each other before the timed steps and gather the result."""
        return ranks

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Called after the result is written: this rank makes no more steps."""


class Proven(Trained):
    """What the same-work proof compares with one process beside losses. All ranks call each method together."""

    def gradient_norm(self) -> float:
        """The L2 norm of the whole model's gradient between forward_backward and update."""
        return float(model_options.gradient_norm(self.model.parameters()))

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """The whole model's parameters by the names that `Task.model` gives them, in fp32 on the CPU, tied ones once.

        Rank 0 has them all, other ranks may give none.
        """
        return model_options.whole_parameters(self.model)

    def start_loss_scale(self, scale: float) -> None:
        """If the precision is fp16, scale losses by `scale`, a power of two, from the next step on."""


class Accounted(ABC):
    """What a run reports about its communication, its memory and the settings that took effect."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def theory(self) -> list[Term]:
        """All terms of the communication that this rank sends per step by theory, for what the strategy really does; the mean
        over `Strategy.communication_period` steps."""

    @abstractmethod
    def effective(self) -> dict[str, Any]:
        """The settings that took effect, read from the wrapped model after its last step, not from the cell."""

    def textbook_bytes(self) -> float | None:
        """The textbook figure for the bytes of one rank and step (2 psi for data parallel, 3 psi for ZeRO-3 and FSDP; psi: the
        bytes of all gradients); None if textbooks give no figure."""
        return None

    def parameters(self) -> int:
        """The trainable parameters of the whole model, tied weights once."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

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


class Saved(ABC):
    """The state of an engine for checkpoints. The defaults are those of parameters that are whole, or sharded as DTensor."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> State:
        """This rank's parts of parameters, buffers and optimizer state, by names that are unique in the whole model. A
        collective, between steps. To load a checkpoint, write into the parts and then call `restored`."""
        named = [(model_options.plain_name(name), parameter) for name, parameter in self.model.named_parameters()]
        return {**state_parts.of_parameters(named, self.optimizer), **state_parts.of_buffers(self.model)}

    def numbers(self) -> dict[str, float]:
        """Other state for a checkpoint: plain numbers, equal on all ranks."""
        return {}

    def make_room(self, numbers: dict[str, float]) -> None:
        """Called before a checkpoint with these numbers is loaded: allocate the state that only first steps would allocate."""
        state_parts.make_room(self.optimizer)

    def restored(self, numbers: dict[str, float]) -> None:  # noqa: B027 - most have nothing to do
        """Called after the parts of `state` were written: update everything that depends on them. A collective."""

    def reordered(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """For a tensor of `state` that was gathered from all ranks to this shape and flattened: the indices of its elements in
        the order and shape of `Task.model`. None if order and shape are the same."""
        return None


class Engine(Proven, Accounted, Saved):
    """A model distributed over the ranks that train."""


class Server(ABC):
    """A parameter server: a rank that holds parameters for the ranks that train. It has no data and records no steps."""

    @abstractmethod
    def serve(self) -> None:
        """Serve until every rank that trains has closed its engine or is lost."""

    @abstractmethod
    def theory(self) -> list[Term]:
        """The communication that this rank sends by theory while each rank that trains makes one step."""
