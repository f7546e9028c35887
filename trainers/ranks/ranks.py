"""The rendezvous of the processes of a run, and the collectives by which they exchange a few numbers outside of training."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlab.errors import InputError
from shardlab.hardware import host
from trainers.ranks.rank import Rank, read_whole_number

# The timeout of a collective is WAITS hang limits plus MARGIN_S seconds. A rank may already have waited almost one hang limit
# when the last other rank makes progress; from then on, the supervisor waits another hang limit.
WAITS_PER_HANG_LIMIT, MARGIN_S = 2, 60


def choose_device(process_rank: Rank, servers: int, *, gpus: int) -> tuple[str, str]:
    """Choose (this rank's device, the backend of all ranks): GPU number LOCAL_RANK and NCCL if there are GPUs, else CPU and
    gloo.

    gpus: the number of GPUs that this process sees. The last `servers` ranks compute on the CPU. NCCL needs a GPU for every
    rank; therefore, if there are servers, all ranks use gloo. Raises InputError if there is no GPU for this rank.
    """
    if not gpus or process_rank.rank >= process_rank.world_size - servers:
        return "cpu", "nccl" if gpus and not servers else "gloo"
    # At some sites, each Slurm task sees only its own GPU, as GPU 0.
    gpu_index = 0 if gpus == 1 and process_rank.is_slurm_task else process_rank.local_rank
    if gpu_index >= gpus:
        raise InputError(
            f"LOCAL_RANK={process_rank.local_rank}, but the process sees {gpus} GPU{'s' * (gpus > 1)}. Each rank of a node "
            "needs its own GPU."
        )
    return f"cuda:{gpu_index}", "gloo" if servers else "nccl"


class Peers(Protocol):
    """The ranks that train, as seen by one of them: all ranks, unless a strategy also has parameter servers."""

    def all_gather_numbers(self, numbers: Sequence[float]) -> np.ndarray:
        """Gather the numbers of all ranks that train. Every rank passes n numbers. Returns an array (number of these ranks, n)
        in float64."""

    def barrier(self) -> None:
        """Wait until every rank that trains has called `barrier` and its device is idle."""


class Ranks:
    """All processes of a run, as seen by one of them: its rank and its device, and collectives on plain numbers.

    There are no collectives on Python objects, because torch transfers objects as pickles.
    """

    def __init__(self, process_rank: Rank, servers: int = 0, hang_limit_s: float = 1800) -> None:
        """Join the process group; blocks until all ranks have joined. Device and backend are those of `choose_device`.

        process_rank: the rank of this process. servers: number of parameter servers, which are the last ranks. hang_limit_s:
        how many seconds the supervisor waits for progress; the timeout of all process groups is longer.
        """
        self.rank, self.local_rank, self.world_size = process_rank.rank, process_rank.local_rank, process_rank.world_size
        has_gpu = torch.cuda.is_available()
        device, self.backend = choose_device(process_rank, servers, gpus=torch.cuda.device_count() if has_gpu else 0)
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # first, because other CUDA calls may allocate memory on the current GPU
        # The device on which the training ranks compute: a GPU's name, or `cpu`. Parameter servers have the same value.
        self.trains_on = torch.cuda.get_device_name() if has_gpu else "cpu"
        torch.set_num_threads(count_threads(process_rank, os.environ, host.count_usable_processors(), gpus=has_gpu))
        # With its default timeouts (10 or 30 minutes), torch could end a rank that may still wait, or end a hanging rank before
        # every rank has logged its stacks. The defaults themselves are replaced, because process groups that strategies create
        # use the defaults and not the timeout of the first group.
        group_timeout = timedelta(seconds=WAITS_PER_HANG_LIMIT * hang_limit_s + MARGIN_S)
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(distributed_c10d, name, group_timeout)
        rendezvous: dict[str, Any]
        if process_rank.world_size == 1:
            rendezvous = {"store": HashStore()}
        else:
            rendezvous = {"init_method": f"file://{process_rank.store}" if process_rank.store else "env://"}
        dist.init_process_group(
            self.backend,
            rank=process_rank.rank,
            world_size=process_rank.world_size,
            timeout=group_timeout,
            device_id=self.device if self.backend == "nccl" else None,
            **rendezvous,
        )

    def make_mesh(self, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A mesh of all ranks in the order of their numbers; the last dimension has consecutive ranks. A collective."""
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def as_single_process(self) -> Ranks:
        """A copy of this object with world size 1 and rank 0, which does not communicate."""
        single_process = copy.copy(self)
        single_process.rank, single_process.world_size = 0, 1
        return single_process

    def all_gather_numbers(self, numbers: Sequence[float]) -> np.ndarray:
        """Gather the numbers of all ranks. Every rank passes n numbers. Returns an array (world_size, n) in float64. A
        collective."""
        sent_numbers = torch.tensor(numbers, dtype=torch.float64, device=self.device if self.backend == "nccl" else "cpu")
        if self.world_size == 1:
            return sent_numbers[None].cpu().numpy()
        gathered_numbers = [torch.empty_like(sent_numbers) for _ in range(self.world_size)]
        dist.all_gather(gathered_numbers, sent_numbers)
        return torch.stack(gathered_numbers).cpu().numpy()

    def broadcast_from_first(self, content: bytes) -> bytes:
        """Broadcast bytes from rank 0: every rank gets the content that rank 0 passes. A collective."""
        size = int(self.all_gather_numbers([float(len(content))])[0, 0])
        sent_bytes = content if self.rank == 0 else bytes(size)
        return (
            bytes(int(number) for number in self.all_gather_numbers([float(byte) for byte in sent_bytes])[0]) if size else b""
        )

    def barrier(self) -> None:
        """Wait until every rank has called `barrier` and its device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.world_size > 1:
            dist.barrier()

    def leave_group(self) -> None:
        dist.destroy_process_group()


def count_threads(process_rank: Rank, environment: Mapping[str, str], usable_processors: int, *, gpus: bool) -> int:
    """The number of threads that a rank uses.

    On a node with GPUs, the number is the rank's share of the node's processors. OMP_NUM_THREADS is ignored there, because
    launchers set it to 1, and one thread is too slow for a parameter server or for offloading. On a node without GPUs, the
    number is OMP_NUM_THREADS, or else 1. A single rank on a node without GPUs also uses this number, because its time is
    compared with the time of several ranks with one thread each.

    usable_processors: number of processors that this process may use. gpus: whether the node has GPUs. Raises InputError if
    a variable is
    not a number.
    """
    if gpus:
        # Slurm may bind each rank to its own processors; then `usable` is already one rank's share. SLURM_CPUS_ON_NODE is the
        # number of processors for all ranks of the node.
        node_processors = (
            read_whole_number(environment, "SLURM_CPUS_ON_NODE") if "SLURM_CPUS_ON_NODE" in environment else usable_processors
        )
        return max(1, min(usable_processors, node_processors // process_rank.local_world_size))
    if "OMP_NUM_THREADS" not in environment:
        return 1
    thread_count = read_whole_number(environment, "OMP_NUM_THREADS")
    if thread_count == 0:
        raise InputError("OMP_NUM_THREADS: found 0. Allowed: a number from 1.")
    return thread_count
