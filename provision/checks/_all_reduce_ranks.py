"""One rank of the all-reduce test. The ranks sum small integers, which float32 represents exactly, so the sums must be exact.

The ranks of one node are forked by provision.checks._trial. For a test between nodes, each node runs one rank with ``python -m
provision.checks._all_reduce_ranks BACKEND NODES PLACE HOST:PORT``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from shardlab.cluster.all_reduce import bus_bandwidth

# The sizes of the tensors, as numbers of 4-byte elements. Small tensors show the latency, large tensors show the bandwidth; the
# planner computes latency and bandwidth from the times. GPUs need larger tensors than a network to reach their bandwidth.
# In bytes: 4 KiB, 256 KiB and 16 MiB for gloo; 16 KiB, 16 MiB and 128 MiB for nccl.
ELEMENTS = {"gloo": (2**10, 2**16, 2**22), "nccl": (2**12, 2**22, 2**25)}
ITERATIONS = 5
WARMUP = 2


def run_node_rank(backend: str, nodes: str, rank: str, endpoint: str) -> None:
    """Run the rank of this node in a test with one rank per node, which uses the first GPU of its node if it uses a GPU.

    nodes: the number of nodes, in decimal. rank: the rank of this node, in decimal. endpoint: HOST:PORT where rank 0 listens.
    """
    host, port = endpoint.rsplit(":", 1)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    run_rank(backend, int(rank), int(nodes), "env://", 0)


def run_rank(backend: str, rank: int, world_size: int, init_method: str, gpu: int | None = None) -> None:
    """Run one rank. Rank 0 prints an AllReduceReport as JSON.

    init_method: the init_method of torch.distributed. gpu: the index of the GPU that the rank uses; None: the index is the
    rank."""
    device = torch.device("cuda", rank if gpu is None else gpu) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=180))
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    times = torch.stack([_measure_times(count, rank, world_size, device, wrong) for count in ELEMENTS[backend]])
    dist.all_reduce(wrong)
    dist.barrier()
    clock = torch.tensor([time.time(), -time.time()], dtype=torch.float64, device=device)
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)  # an all-reduce takes as long as its slowest rank
    if rank == 0:
        sizes = [
            _summarize_times(4 * count, world_size, row) for count, row in zip(ELEMENTS[backend], times.tolist(), strict=True)
        ]
        report = {
            "backend": backend,
            "ranks": world_size,
            "bytes": sizes[-1]["bytes"],
            "wrong": int(wrong.item()),
            "iterations": ITERATIONS,
            "time_s": sizes[-1]["seconds"],
            "clock_spread_s": float(clock.sum()),
            "times": sizes,
        }
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def _measure_times(elements: int, rank: int, world_size: int, device: torch.device, wrong: torch.Tensor) -> torch.Tensor:
    """Sum tensors of one size. Returns the seconds of each iteration on this rank, without the warm-up.

    wrong: the number of wrong elements is added to this tensor.
    """
    base = torch.arange(elements, device=device, dtype=torch.float32).remainder_(1024)
    expected_sum = base * world_size + world_size * (world_size - 1) / 2
    times = torch.zeros(WARMUP + ITERATIONS, dtype=torch.float64, device=device)
    for iteration in range(WARMUP + ITERATIONS):
        values = base + rank
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times[iteration] = time.perf_counter() - begin
        wrong += (values != expected_sum).sum()
    return times[WARMUP:]


def _summarize_times(size: int, world_size: int, times: list[float]) -> dict[str, float]:
    """The fields of an AllReduceTime, by name. size: the size of the tensor in bytes. times: for each iteration, the seconds on
    the slowest rank."""
    median_s = statistics.median(times)
    rate = bus_bandwidth(world_size, size, median_s) / 1e9
    return {
        "bytes": size,
        "seconds": median_s,
        "fastest_s": min(times),
        "slowest_s": max(times),
        "bus_bandwidth_gb_per_s": rate,
    }


if __name__ == "__main__":
    run_node_rank(*sys.argv[1:])
