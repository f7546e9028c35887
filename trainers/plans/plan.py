"""The interface of a plan: how to split a model's layers for tensor parallelism, and how to divide it into pipeline stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class ModelPlan(ABC):
    """How one model is split and divided into stages."""

    hidden_shape: tuple[int, ...]
    """The shape of the hidden state of one item between two blocks; for a transformer, (positions, width)."""
    backward_reductions: int
    """Number of all-reduces of a hidden state in the backward pass of a split block, one for each column-parallel layer.
    forward_reductions: number of all-reduces of a hidden state in the forward pass of a split block, one for each row-parallel
    layer. A transformer has one after attention and one after the MLP (Shoeybi et al., Megatron-LM, 2019, section 3)."""
    forward_reductions = 2
    vocabulary_layers: tuple[str, str] | None = None
    """The names in `Task.model` of the embedding of tokens and of the head whose rows may be split over tensor-parallel ranks;
    None: these layers are not split."""

    def __init__(self, positions: int, width: int) -> None:
        self.hidden_shape = (positions, width)

    @abstractmethod
    def split(self, block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> list[nn.Parameter]:
        """Split a block's linear layers over the ranks of a 1-D mesh, in place. Before the call, all ranks have equal weights.

        sequence: whether the hidden states that enter and leave the block have only this rank's slice of the positions
        (sequence parallelism). Returns the parameters that see only this slice; the caller must sum their gradients over the
        ranks.
        """

    def restore_parameter(self, name: str, parameter: torch.Tensor, ranks: int) -> torch.Tensor:
        """Undo the changes of `split` in a gathered parameter: return it in the shape and order that it has in `Task.model`.

        name: the name of the parameter in `Task.model`. ranks: the number of ranks over which the model is split.
        """
        return parameter

    @abstractmethod
    def build_stage(self, model: nn.Module, index: int, stage_count: int) -> nn.Module:
        """The pipeline stage `index` (from 0) of `stage_count` stages. It uses modules of the model, without copies.

        The first stage gets the model's inputs, the last stage returns its outputs. Between stages, a hidden state
        (items, *hidden) is passed on.
        """


POSITIONS = 1  # the index of the dimension `positions` in a hidden state (items, positions, width)


def slice_stage_blocks(block_count: int, index: int, stage_count: int) -> slice:
    """The blocks of stage `index` of `stage_count` stages: consecutive blocks, as equal in number as possible. block_count: the
    number of all blocks."""
    return slice(index * block_count // stage_count, (index + 1) * block_count // stage_count)


def add_sequence_hooks(first: nn.Module, last: nn.Module, mesh: DeviceMesh) -> None:
    """Prepare sequence parallelism, in which each rank has only its slice of the positions between split layers.

    With sequence parallelism, a reduce-scatter and an all-gather replace each all-reduce of tensor parallelism; they send the
    same bytes and need 1/n of the memory (Korthikanti et al., Reducing activation recomputation, 2022). This function adds the
    hooks that slice the hidden state before the first block and gather the hidden state after the last block. A hidden state is
    the first argument of a block and its only output.
    """

    def split_positions(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        replicated = DTensor.from_local(arguments[0], mesh, [Replicate()], run_check=False)
        return (replicated.redistribute(placements=[Shard(POSITIONS)]).to_local(), *arguments[1:])

    def gather_output(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (_gather_positions(output[0], mesh).to_local(), *output[1:])
        return _gather_positions(output, mesh).to_local()

    first.register_forward_pre_hook(split_positions)
    last.register_forward_hook(gather_output)


def add_gathering_hook(section: nn.Module, mesh: DeviceMesh) -> None:
    """Make a section of a block gather its hidden state, of which each rank has a slice of the positions, so that all of its
    layers read the whole. The hidden state is its first argument, or the one named hidden_states."""

    def gather(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (_gather_positions(arguments[0], mesh), *arguments[1:]), keywords
        return arguments, {**keywords, "hidden_states": _gather_positions(keywords["hidden_states"], mesh)}

    section.register_forward_pre_hook(gather, with_kwargs=True)


def _gather_positions(hidden: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The whole hidden state, of which this rank has a slice of the positions (items, positions, width)."""
    return DTensor.from_local(hidden, mesh, [Shard(POSITIONS)], run_check=False).redistribute(placements=[Replicate()])
