"""How the processes of a run find each other, and the few numbers that they exchange beside training."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shardlab.errors import InputError

if TYPE_CHECKING:
    import numpy as np

STORE = "SHARDLAB_STORE"  # set by the fork launcher: the file at which its ranks meet
# A rank may have waited for almost a bound when the last other one gets on, after which the supervisor waits for a whole one.
WAITS, MARGIN_S = 2, 60


class Place(msgspec.Struct, frozen=True):
    """Which process of how many this is, as the launcher says it; without a launcher, the only one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """RANK, LOCAL_RANK and WORLD_SIZE of an environment: all of them or none. Raises InputError otherwise."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        found = [name for name in names if name in environment]
        if not found:
            return cls()
        if len(found) < len(names):
            missing = ", ".join(name for name in names if name not in environment)
            raise InputError(f"the environment has {', '.join(found)} but not {missing}; a launcher sets all three.")
        rank, local_rank, world_size = (_number(environment, name) for name in names)
        if not (rank < world_size and local_rank < world_size):
            raise InputError(f"RANK={rank} and LOCAL_RANK={local_rank} do not fit WORLD_SIZE={world_size}.")
        return cls(rank, local_rank, world_size, environment.get(STORE))


def devices(place: Place, servers: int, *, cuda: bool) -> tuple[str, str]:
    """(this rank's device, the backend of all ranks): GPU number LOCAL_RANK and NCCL where there are GPUs, else CPU and gloo.

    The last `servers` ranks compute on the CPU and have no GPU, which NCCL needs of every rank: with them all talk over gloo.
    """
    serves = place.rank >= place.world_size - servers
    return f"cuda:{place.local_rank}" if cuda and not serves else "cpu", "nccl" if cuda and not servers else "gloo"


class Company(Protocol):
    """Those who train, as one of them sees the others: all ranks, unless a strategy has ranks of another kind."""

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """The numbers of each of them by rank, (how many they are, n) in float64; all give equally many."""

    def barrier(self) -> None:
        """Wait until each of them is here and its device has nothing left to do."""


class Ranks:
    """All processes of a run as one of them sees them; its device, and collectives on plain numbers (never on objects)."""

    def __init__(self, place: Place, servers: int = 0, hang_limit_s: float = 1800) -> None:
        """Join the others; blocks until all are there. Device and backend are those of `devices`; the last `servers` ranks
        are parameter servers. hang_limit_s: what the supervisor waits for progress; collectives of all groups wait longer."""
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import HashStore
        from torch.distributed import distributed_c10d

        self.rank, self.local_rank, self.world_size = place.rank, place.local_rank, place.world_size
        self.forked = place.store is not None
        cuda = torch.cuda.is_available()
        self.trains_on = "cuda" if cuda else "cpu"  # the type of the devices of those that train; of servers as well
        device, self.backend = devices(place, servers, cuda=cuda)
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if (threads := _threads(place.world_size, cuda=cuda)) is not None:
            torch.set_num_threads(threads)
        # torch's own 10 or 30 minutes would end a rank that may yet wait for another, or forestall the supervisor, which has
        # every rank say where it is. Groups that strategies make on their own take the defaults, not those of the first group.
        waits = timedelta(seconds=WAITS * hang_limit_s + MARGIN_S)
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(distributed_c10d, name, waits)
        meeting: dict[str, Any]
        if place.world_size == 1:
            meeting = {"store": HashStore()}
        else:
            meeting = {"init_method": f"file://{place.store}" if place.store else "env://"}
        dist.init_process_group(
            self.backend,
            rank=place.rank,
            world_size=place.world_size,
            timeout=waits,
            device_id=self.device if self.backend == "nccl" else None,
            **meeting,
        )

    def alone(self) -> Ranks:
        """This process as the only one of a world of its own, which talks to nobody."""
        only = copy.copy(self)
        only.rank, only.world_size = 0, 1
        return only

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """Every rank's numbers, (world_size, n) in float64; all ranks give equally many."""
        import torch
        import torch.distributed as dist

        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device if self.backend == "nccl" else "cpu")
        if self.world_size == 1:
            return mine[None].cpu().numpy()
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).cpu().numpy()

    def barrier(self) -> None:
        """Wait until every rank is here and its device has nothing left to do."""
        import torch
        import torch.distributed as dist

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.world_size > 1:
            dist.barrier()

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def _threads(world_size: int, *, cuda: bool) -> int | None:
    """Threads per rank: OMP_NUM_THREADS, else 1 among several ranks and on a CPU, else torch's own choice (None).

    On a CPU also where a rank is alone: what one rank takes is held against what several take, each on one thread.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        return 1 if world_size > 1 or not cuda else None
    threads = _number(os.environ, "OMP_NUM_THREADS")
    if threads == 0:
        raise InputError("OMP_NUM_THREADS: found 0. Allowed: a number from 1.")
    return threads


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{name}: found {text!r}. Allowed: a whole number from 0.")
    return int(text)
