"""The protocol between workers and servers: requests and replies, sent as tensors over gloo.

Point-to-point calls of `torch.distributed` are used and not RPC: RPC's TensorPipe is legacy and pickles every call, and a
rehearsal of three ranks took 1.1 s with RPC and 0.5 s without it. If a peer is lost, gloo raises an error at once in the calls
that wait for this peer, and in no others. Each receive names its sender, so that it is known whose connection broke; NCCL
cannot receive from any source. Tensors are sent from host memory, even if workers compute on GPUs, because servers need no GPU.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import Work

if TYPE_CHECKING:
    from trainers.ranks.ranks import Ranks

HEADER_FIELDS = 4  # number of float64 values in a header: kind, a, b, c of a request; a, b, c and an unused value of a reply


class RequestKind(IntEnum):
    """The kinds of requests, with their numbers a, b, c. A server answers all but BYE; a worker sends one request at a time.

    PUSH: applies a gradient. Request: the gradient for this server's share follows; a: version of the parameters with which it
        was computed, b: learning rate, c: 1 if the worker wants parameters back. Answer, when the worker may begin its next
        step: a: version of the parameters, which follow if c was 1.
    PULL: requests parameters. Answer: a: version of the parameters, which follow.
    MEET: gathers numbers of all workers, and is their barrier. Request: `a` float64 numbers follow. Answer, when all workers
        that are left have sent MEET: a: number of rows that follow, one row per rank.
    ASK: requests the server's counts. Answer: `a` bytes of JSON follow.
    BYE: the worker leaves. No answer.
    LOST: is never sent; the server itself puts it into its queue when the connection to a worker breaks.
    SAVE: requests the momentum. Answer: a: 1 if this server has momentum, which then follows.
    RESTORE: sets the server's state. Request: the server's share of the parameters follows, and, if b is 1, the momentum;
        a: number of updates so far. Answer, when the state is set: no content.
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
    """Messages between the workers and servers of a run, over their process group. A call raises RuntimeError if the other rank
    is lost. `other` is always the rank of the sender or receiver at the other end."""

    def __init__(self, ranks: Ranks, *, worker_count: int = 0) -> None:
        """Create the process group, and a second group of the first ranks, whose size is `worker_count`. A collective of all
        ranks.

        Servers take part in making the workers' group: torch 2.14 counts the groups that a rank makes, and puts the number into
        their names, so that ranks that made different numbers of groups would wait for each other forever.
        """
        self._group = dist.new_group(list(range(ranks.world_size)), backend="gloo")
        self.workers = dist.new_group(list(range(worker_count)), backend="gloo") if worker_count else None
        self._pending_sends: dict[int, list[Work]] = {}  # keeps the sent tensors in memory until the other rank has answered

    def send(self, other_rank: int, header: tuple[float, ...], payload: torch.Tensor | None = None) -> None:
        """Begin to send a message, without waiting for the receiver. The payload must not change until the receiver has
        answered. header: up to FIELDS numbers."""
        numbers = torch.tensor([*header, *[0.0] * (HEADER_FIELDS - len(header))], dtype=torch.float64)
        sends = [dist.isend(tensor, dst=other_rank, group=self._group) for tensor in (numbers, payload) if tensor is not None]
        self._pending_sends[other_rank] = [send for send in sends if send is not None]

    def flush(self, other_rank: int) -> None:
        """Wait until the last message to the rank `other_rank` is sent."""
        for send in self._pending_sends.pop(other_rank):
            send.wait()

    def receive_header(self, other_rank: int) -> list[float]:
        """Wait for the header of the next message from the rank `other_rank` and return its numbers."""
        header_numbers: list[float] = self.receive(other_rank, torch.empty(HEADER_FIELDS, dtype=torch.float64)).tolist()
        return header_numbers

    def receive(self, other_rank: int, target: torch.Tensor) -> torch.Tensor:
        """Wait for the payload that follows a header, and write it into the tensor `target`, which is returned."""
        dist.recv(target, src=other_rank, group=self._group)
        return target


def list_server_slices(element_count: int, server_count: int) -> list[slice]:
    """The slice of the flat vector of all parameters that each server has. The sizes differ by at most one element.

    A slice may begin or end inside a parameter, because SGD updates each element independently. element_count: size of the
    vector.
    """
    slice_bounds = [element_count * server // server_count for server in range(server_count + 1)]
    return [slice(begin, end) for begin, end in pairwise(slice_bounds)]
