"""The interfaces of an engine and of a parameter server, which strategies build. An engine trains the model on one rank.

The interface of an engine has four parts, because four parts of the code use it: the training loop uses `Trainable`, the
same-work proof `Provable`, the result and the memory instruments `Accountable`, and checkpoints `Checkpointable`. An `Engine`
has all four parts.
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
    from trainers.instruments.timing import Clock
    from trainers.ranks.ranks import Peers, Ranks
    from trainers.task import Batch
    from trainers.theory.term import Term


class Trainable(ABC):
    """A model distributed over ranks, with the methods that make one optimizer step.

    Before every step, the training loop sets the learning rate in `optimizer.param_groups`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data_ranks: int
    """The number of equal slices of the global batch. Usually each rank that trains has its own slice; ranks that share one
    model (tensor or pipeline parallelism) share a slice."""
    data_rank: int
    """The number of the slice on which this rank trains, from 0."""
    has_short_steps = False
    """Whether each epoch ends with a short step for the items that do not fill a global batch. In this step, some ranks have no
    data."""

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        """Accumulate the gradients of one step and return this rank's mean loss (0-dim, detached, on the device).

        The mean of the losses of all ranks is the mean loss of the global batch.
        """

    @abstractmethod
    def update(self) -> None:
        """Clip the gradients to the cell's max_grad_norm (None: do not clip), make the optimizer step, clear the gradients."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate a micro-batch: (mean loss, number of right predictions), both 0-dim on the device.

        The micro-batch has the same shape as in training. A collective; the caller has set the model to evaluation mode. Ranks
        that share a model get the same values.
        """

    def join_short_step(self) -> AbstractContextManager[object]:
        """The context of the last, short step of an epoch, for engines whose `has_short_steps` is true. In this step, a rank
        without data does not train."""
        raise NotImplementedError

    def finish(self) -> None:  # noqa: B027 - most engines have nothing to do here
        """Bring the parameters into their final state. Called after the update of the last step, as a part of this step.

        A strategy that averages parameters every few steps averages here. The last validation, the last checkpoint, the result
        and the proof read the parameters afterwards. A collective.
        """

    def refresh_parameters(self) -> None:  # noqa: B027 - the parameters of most engines are always up to date
        """Bring the parameters of this rank up to date before they are evaluated. No collective: ranks need not call it
        together."""

    def select_training_peers(self, ranks: Ranks) -> Peers:
        """The ranks that wait for each other before the timed steps and gather the result."""
        return ranks

    def close(self) -> None:  # noqa: B027 - most engines have nothing to do here
        """End the engine, for example tell parameter servers that this worker leaves. Called after the result is written."""


class Provable(Trainable):
    """The part of an engine that the same-work proof needs: the values that the proof compares with one process besides losses.

    Each method is a collective.
    """

    def gradient_norm(self) -> float:
        """The L2 norm of the whole model's gradient. Called between `forward_backward` and `update`."""
        return float(model_options.compute_gradient_norm(self.model.parameters()))

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """The whole model's parameters by their names in `Task.model`, in fp32 on the CPU. A tied parameter is there only once.

        Rank 0 returns all parameters; other ranks may return an empty dict.
        """
        return model_options.gather_whole_parameters(self.model)

    def start_loss_scale(self, scale: float) -> None:
        """From the next step on, scale losses by `scale`, a power of two. Does nothing unless the precision is fp16."""


class Accountable(ABC):
    """The part of an engine that the result and the memory instruments need: communication, memory and effective settings."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def theory(self) -> list[Term]:
        """The communication that this rank sends per step by theory, as a list of terms; the mean over
        `Strategy.communication_period` steps. The terms describe the strategy as implemented here, not as in textbooks."""

    @abstractmethod
    def effective(self) -> dict[str, Any]:
        """The settings that took effect. They are read from the wrapped model and the optimizer after the last step, not from
        the cell, so that a setting without effect is noticed."""

    def compute_textbook_bytes(self) -> float | None:
        """The bytes that one rank sends in one step according to textbooks; None if textbooks give no number.

        They are 2 psi for data parallelism, and 3 psi for ZeRO-3 and FSDP, where psi is the bytes of all gradients.
        """
        return None

    def count_total_sent_bytes(self) -> dict[str, float] | None:
        """The bytes that all ranks together send in a step, with parameter servers, by kind as in `SameWork`; None if only
        the terms of all ranks (`theory`) give this number."""
        return None

    def count_parameters(self) -> int:
        """The number of trainable parameters of the whole model; tied weights count once."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def list_tensors_by_category(self) -> dict[str, list[torch.Tensor]]:
        """The tensors that are now in this rank's memory, by category: `parameter`, `gradient`, `optimizer_state` and
        `master_parameter`. The last category has the copies of parameters that the optimizer updates, if it updates copies.
        Called between passes, never during a pass."""
        parameters = list(self.model.parameters())
        updated_tensors = [p for group in self.optimizer.param_groups for p in group["params"]]
        state_values = [value for parameter_state in self.optimizer.state.values() for value in parameter_state.values()]
        return {
            "parameter": parameters,
            "gradient": [p.grad for p in (*parameters, *updated_tensors) if p.grad is not None],
            "optimizer_state": [value for value in state_values if hasattr(value, "untyped_storage")],
            "master_parameter": updated_tensors,  # tensors that share their memory with a parameter are counted as `parameter`
        }


class Checkpointable(ABC):
    """The part of an engine that checkpoints need: its state. The default methods are for whole parameters, and for parameters
    that are sharded as DTensor."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def make_state_parts(self) -> State:
        """This rank's parts of parameters, buffers and optimizer state, by names that are unique in the whole model.

        A collective, called between steps. To load a checkpoint, write into the memory of the parts; then `finish_loading`.
        """
        named_parameters = [(model_options.plain_name(name), parameter) for name, parameter in self.model.named_parameters()]
        return {
            **state_parts.make_parameter_parts(named_parameters, self.optimizer),
            **state_parts.make_buffer_parts(self.model),
        }

    def collect_numbers(self) -> dict[str, float]:
        """Further state for a checkpoint, such as the loss scale: numbers by name, equal on all ranks."""
        return {}

    def allocate_optimizer_state(self, numbers: dict[str, float]) -> None:
        """Allocate the optimizer state that otherwise the first step would allocate. Called before a checkpoint is loaded.

        numbers: the numbers that the method `collect_numbers` returned when the checkpoint was saved.
        """
        state_parts.allocate_optimizer_state(self.optimizer)

    def finish_loading(self, numbers: dict[str, float]) -> None:  # noqa: B027 - most engines have nothing to do here
        """Update everything that depends on the parts of `make_state_parts`. A collective, called after a checkpoint was
        loaded into the parts.

        numbers: the numbers that the method `collect_numbers` returned when the checkpoint was saved.
        """

    def element_order(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """The order of a gathered tensor's elements in `Task.model`; None if order and shape are already the same.

        name: the tensor's name in `make_state_parts`. shape: its shape after its parts were gathered from all ranks.
        Returns indices into the flattened gathered tensor, in the shape that the tensor has in `Task.model`.
        """
        return None


class Engine(Provable, Accountable, Checkpointable):
    """An engine with all parts of the interface: it trains a model that is distributed over the ranks that train."""


class Server(ABC):
    """A parameter server: a rank that stores parameters for the ranks that train. It has no data and writes no step records."""

    @abstractmethod
    def serve(self) -> None:
        """Serve until every rank that trains has closed its engine or is lost."""

    @abstractmethod
    def theory(self) -> list[Term]:
        """The communication that this rank sends by theory while each rank that trains makes one step."""
