"""What workers and servers say to each other: requests and replies of a worker with each server, as tensors over gloo.

Point to point with `torch.distributed` rather than RPC: RPC's TensorPipe is legacy and pickles every call, and a rehearsal
of three ranks took 1.1 s with it and 0.5 s without. On gloo a lost peer fails the calls that wait for it and no others, at
once. Each receive names its sender: so it is known whose connection broke, and NCCL has no receive from any source.
Tensors travel through host memory, also where workers compute on GPUs: servers need none.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import Work

    from trainers.ranks import Ranks

FIELDS = 4  # float64 numbers in a header: kind and a, b, c of a request; a, b, c of a reply and a spare


class Kind(IntEnum):
    """A request and what its a, b and c are; every one but BYE is answered, and a worker asks one thing at a time.

    PUSH: the gradient of this server's share follows; a: version it was computed on, b: learning rate, c: 1 where
    parameters are wanted. Answered when the worker may begin its next step; a: version of the parameters, which follow
    where they were wanted. PULL: parameters are wanted; answered as PUSH. MEET: a float64 numbers follow; answered when
    all workers that are left have come, a: how many rows of that many numbers follow, by rank. ASK: answered with a bytes
    of JSON, what the server knows of itself. BYE: the worker leaves. LOST: never sent; a server notes it for a worker
    whose connection broke. SAVE: answered with a: 1 where this server has momentum, which follows. RESTORE: its share of
    the parameters follows, where b is 1 with the momentum behind it; a: updates made so far. Answered when it is done.
    """

    PUSH = 1
    PULL = 2
    MEET = 3
    ASK = 4
    BYE = 5
    LOST = 6
    SAVE = 7
    RESTORE = 8


class Link:
    """The process group of a run's workers and servers. A call raises RuntimeError where the other end is lost."""

    def __init__(self, ranks: Ranks) -> None:
        """All ranks open theirs together."""
        import torch.distributed as dist

        self._group = dist.new_group(list(range(ranks.world_size)), backend="gloo")
        self._sending: dict[int, list[Work]] = {}  # gloo drops what nobody holds; the other end's answer says it has come

    def send(self, other: int, header: tuple[float, ...], payload: torch.Tensor | None = None) -> None:
        """Begin to send, and do not wait for a slow receiver. The payload may change again when the other end has answered."""
        import torch
        import torch.distributed as dist

        numbers = torch.tensor([*header, *[0.0] * (FIELDS - len(header))], dtype=torch.float64)
        works = [dist.isend(part, dst=other, group=self._group) for part in (numbers, payload) if part is not None]
        self._sending[other] = [work for work in works if work is not None]

    def flush(self, other: int) -> None:
        """Wait until the last message is sent."""
        for work in self._sending.pop(other):
            work.wait()

    def header(self, other: int) -> list[float]:
        """Wait for the header of the next message."""
        import torch

        numbers: list[float] = self.receive(other, torch.empty(FIELDS, dtype=torch.float64)).tolist()
        return numbers

    def receive(self, other: int, into: torch.Tensor) -> torch.Tensor:
        """Wait for the payload that follows a header."""
        import torch.distributed as dist

        dist.recv(into, src=other, group=self._group)
        return into


def shares(elements: int, servers: int) -> list[slice]:
    """The part of the flat parameters (all of a model's, in its order) that each server holds: equal but for one element.

    It cuts through parameters where it comes to that: SGD works on each element alone.
    """
    bounds = [elements * server // servers for server in range(servers + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]
