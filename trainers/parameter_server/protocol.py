"""The protocol between workers and servers: requests and replies, sent as tensors over gloo.

Point to point with `torch.distributed` rather than RPC: RPC's TensorPipe is legacy and pickles every call, and a rehearsal
of three ranks took 1.1 s with it and 0.5 s without. If a peer is lost, gloo at once fails the calls that wait for this peer,
and no others. Each receive names its sender, so that it is known whose connection broke; NCCL cannot receive from any source.
Tensors are sent from host memory, even if workers compute on GPUs: servers need no GPU.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import Work

if TYPE_CHECKING:
    from trainers.ranks import Ranks

FIELDS = 4  # float64 numbers in a header: kind and a, b, c of a request; a, b, c of a reply and a spare


class Kind(IntEnum):
    """The kinds of requests, with their numbers a, b, c. A server answers all but BYE; a worker sends one request at a time.

    PUSH: followed by the gradient for this server's share. a: version of the parameters on which it was computed, b: learning
    rate, c: 1 to get parameters back. Answered when the worker may begin its next step: a: version of the parameters, which
    follow if requested.
    PULL: requests parameters; answered like PUSH.
    MEET: followed by `a` float64 numbers. Answered when all workers that are left have sent it: a: number of rows that follow,
    one row per rank.
    ASK: answered with `a` bytes of JSON, the server's counts.
    BYE: the worker leaves.
    LOST: never sent; the server's own note that the connection to a worker broke.
    SAVE: answered with a: 1 if this server has momentum, which then follows.
    RESTORE: followed by the server's share of the parameters and, if b is 1, the momentum. a: number of updates so far.
    Answered when it is done.
    """

    PUSH = 1
    PULL = 2
    MEET = 3
    ASK = 4
    BYE = 5
    LOST = 6
    SAVE = 7
    RESTORE = 8


class ServerLink:
    """The process group of a run's workers and servers. A call raises RuntimeError if the other end is lost."""

    def __init__(self, ranks: Ranks) -> None:
        """A collective: all ranks call it."""
        self._group = dist.new_group(list(range(ranks.world_size)), backend="gloo")
        self._sending: dict[int, list[Work]] = {}  # keeps sends alive until the other end has answered

    def send(self, other: int, header: tuple[float, ...], payload: torch.Tensor | None = None) -> None:
        """Begin to send, without waiting for the receiver. The payload must not change until the other end has answered."""
        numbers = torch.tensor([*header, *[0.0] * (FIELDS - len(header))], dtype=torch.float64)
        works = [dist.isend(part, dst=other, group=self._group) for part in (numbers, payload) if part is not None]
        self._sending[other] = [work for work in works if work is not None]

    def flush(self, other: int) -> None:
        """Wait until the last message is sent."""
        for work in self._sending.pop(other):
            work.wait()

    def header(self, other: int) -> list[float]:
        """Wait for the header of the next message."""
        numbers: list[float] = self.receive(other, torch.empty(FIELDS, dtype=torch.float64)).tolist()
        return numbers

    def receive(self, other: int, into: torch.Tensor) -> torch.Tensor:
        """Wait for the payload that follows a header."""
        dist.recv(into, src=other, group=self._group)
        return into


def shares(elements: int, servers: int) -> list[slice]:
    """The slice of the flat vector of all parameters that each server has. Slices differ by at most one element.

    A slice may begin or end inside a parameter, because SGD updates each element independently.
    """
    bounds = [elements * server // servers for server in range(servers + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]
