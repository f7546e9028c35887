"""The terms of a theory: what a rank sends in a step, by collective, and the sizes of the rank's part of the model.

Sent bytes assume the ring algorithm (Patarasuk and Yuan, 2009; the bus-bandwidth factors of nccl-tests). With n ranks, one rank
sends

- 2 (n-1)/n S bytes in an all-reduce of S bytes
- (n-1)/n S bytes in an all-gather whose output has S bytes, in a reduce-scatter whose input has S bytes, in an all-to-all of
  S bytes, and, as the mean over the ranks, in a broadcast of S bytes
- S bytes in a send of S bytes

Some backends use other algorithms and send more bytes on the wire; `WIRE_FACTORS` has their factors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from trainers.model.precision import scales_loss

Axis = Literal["dp", "replicas", "tp", "pp"]
# Parts of the computing of a step that communication may overlap with: all of it, the backward of all passes, that of the last
Window = Literal["step", "backward", "last_backward"]
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}
WIRE_FACTORS = {
    # gloo implements a reduce-scatter as an all-reduce of the whole input (tests/trainers/engines/test_trainers_wire.py
    # measures all six collectives).
    "gloo": {**FACTORS, "reduce_scatter": FACTORS["all_reduce"]},
    "nccl": FACTORS,  # factors of the ring algorithm, which NCCL uses for large messages; no test measures them
}
"""Backend -> collective -> function of the number of ranks that gives the bytes that a rank sends, divided by the payload."""
SCALAR_BYTES = 4  # bytes of a loss, a norm or a flag, which ranks exchange as single numbers


class Term(msgspec.Struct, frozen=True):
    """One kind of communication in a step of one rank, by theory."""

    description: str
    """The kind of communication in words."""
    op: str
    """The collective, a key of FACTORS."""
    payload_bytes: float
    """The bytes S of one collective, or of `calls` collectives together."""
    ranks: int
    """The number n of ranks in the collective."""
    times: float = 1.0
    """How often the payload is sent per step."""
    calls: float = 1
    """The number of collectives that send the payload. The time depends on it, the sent bytes do not."""
    axis: Axis = "dp"
    """The dimension of the mesh whose ranks communicate."""
    hides_in: Window | None = None
    """The part of the computing that may run at the same time; None: the rank waits."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends in one step for this kind of communication, by theory."""
        return FACTORS[self.op](self.ranks) * self.payload_bytes * self.times

    def wire_bytes(self, backend: str) -> float:
        """Bytes that this rank sends in one step for this kind of communication over a backend (`gloo`, `nccl`).

        Raises KeyError if WIRE_FACTORS does not contain the backend.
        """
        return WIRE_FACTORS[backend][self.op](self.ranks) * self.payload_bytes * self.times


class ModelPart(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a rank's part of the model on which its terms depend. An engine reads them from its model; the planner
    computes them from the shape of the model, and does not know the fields that are None."""

    elements: float
    """The number of elements of the parameters, with the rows by which `fully_shard` pads them."""
    blocks: int = 0
    """The number of blocks."""
    block_elements: float = 0.0
    """The part of `elements` in the blocks."""
    buffer_bytes: int = 0
    """The bytes of the model's buffers, such as the statistics of BatchNorm."""
    powersgd_bytes: tuple[int, int] | None = None
    """(bytes of gradients that PowerSGD does not compress, bytes of the factors of all others)."""
    fetched: tuple[int, int] | None = None
    """With ZeRO-3: (elements that a pass gathers, counted each time they are gathered; elements that are not sharded)."""
    matrix_elements: int = 0
    """The number of elements of the matrices whose gradients ZeRO++ can quantise."""
    hidden_elements: float | None = None
    """The number of elements of the hidden state of a micro-batch between two blocks."""
    recomputed_blocks: int = 0
    """The number of blocks whose activations are recomputed in backward."""
    reductions: tuple[int, int] | None = None
    """Of a block that is split over tp: (row-parallel layers, of which each reduces its output in forward; column-parallel
    layers, of which each reduces the gradient of its input in backward)."""
    has_split_embedding: bool = False
    """Whether the rank has a slice of an embedding whose rows are split over tp."""
    split_logit_rows: int = 0
    """The rows of the logits of a micro-batch, if the rank has a slice of a head whose rows are split over tp; else 0."""
    partial_elements: int = 0
    """With sequence parallelism: the elements of parameters, such as norms, that see only a slice of the positions."""
    messages: int = 0
    """The number of hidden states and their gradients that the rank sends to other stages for each micro-batch."""
    tied: tuple[tuple[float, int], ...] = ()
    """Of each weight that several stages have: (its elements on this rank, the number of ranks that have it)."""


def list_overflow_terms(precision: str, group_size: int) -> list[Term]:
    """The all-reduce of the overflow flag, with which `group_size` ranks with different gradients agree to skip a step; no term
    if the precision needs no loss scaling."""
    if not scales_loss(precision):
        return []
    return [Term("the sign that a gradient overflowed, once a step", "all_reduce", SCALAR_BYTES, group_size)]
