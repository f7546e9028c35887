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

from shardlab.cluster.all_reduce import compute_bus_bandwidth

# The sizes of the tensors, as numbers of 4-byte elements. Small tensors show the latency, large tensors show the bandwidth; the
# planner computes latency and bandwidth from the times. GPUs need larger tensors than a network to reach their bandwidth.
# In bytes: 4 KiB, 256 KiB and 16 MiB for gloo; 16 KiB, 16 MiB and 128 MiB for nccl.
ELEMENT_COUNTS = {"gloo": (2**10, 2**16, 2**22), "nccl": (2**12, 2**22, 2**25)}
TIMED_ITERATIONS = 5
WARMUP_ITERATIONS = 2


def run_node_rank(backend: str, node_count: str, rank_text: str, endpoint: str) -> None:
    """Run the rank of this node in a test with one rank per node, which uses the first GPU of its node if it uses a GPU.

    node_count: the number of nodes, in decimal. rank_text: the rank of this node, in decimal. endpoint: HOST:PORT where rank 0
    listens."""
    host, port = endpoint.rsplit(":", 1)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    run_rank(backend, int(rank_text), int(node_count), "env://", 0)


def run_rank(backend: str, rank: int, world_size: int, init_method: str, gpu_index: int | None = None) -> None:
    """Run one rank. Rank 0 prints an AllReduceReport as JSON.

    init_method: the init_method of torch.distributed. gpu_index: the index of the GPU that the rank uses; None: the index is
    the rank."""
    device = torch.device("cuda", rank if gpu_index is None else gpu_index) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=180))
    wrong_count = torch.zeros(1, dtype=torch.int64, device=device)
    times_s = torch.stack([_measure_times(count, rank, world_size, device, wrong_count) for count in ELEMENT_COUNTS[backend]])
    dist.all_reduce(wrong_count)
    dist.barrier()
    clock_bounds = torch.tensor([time.time(), -time.time()], dtype=torch.float64, device=device)
    dist.all_reduce(clock_bounds, op=dist.ReduceOp.MAX)
    dist.all_reduce(times_s, op=dist.ReduceOp.MAX)  # an all-reduce takes as long as its slowest rank
    if rank == 0:
        size_reports = [
            _summarize_times(4 * count, world_size, iteration_times_s)
            for count, iteration_times_s in zip(ELEMENT_COUNTS[backend], times_s.tolist(), strict=True)
        ]
        report_fields = {
            "backend": backend,
            "ranks": world_size,
            "bytes": size_reports[-1]["bytes"],
            "wrong": int(wrong_count.item()),
            "iterations": TIMED_ITERATIONS,
            "time_s": size_reports[-1]["seconds"],
            "clock_spread_s": float(clock_bounds.sum()),
            "times": size_reports,
        }
        sys.stdout.write(json.dumps(report_fields) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def _measure_times(element_count: int, rank: int, world_size: int, device: torch.device, wrong: torch.Tensor) -> torch.Tensor:
    """Sum tensors of one size. Returns the seconds of each iteration on this rank, without the warm-up.

    wrong: the number of wrong elements is added to this tensor.
    """
    base_values = torch.arange(element_count, device=device, dtype=torch.float32).remainder_(1024)
    expected_sum = base_values * world_size + world_size * (world_size - 1) / 2
    iteration_times_s = torch.zeros(WARMUP_ITERATIONS + TIMED_ITERATIONS, dtype=torch.float64, device=device)
    for iteration in range(WARMUP_ITERATIONS + TIMED_ITERATIONS):
        rank_values = base_values + rank
        dist.barrier()
        begin_s = time.perf_counter()
        dist.all_reduce(rank_values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        iteration_times_s[iteration] = time.perf_counter() - begin_s
        wrong += (rank_values != expected_sum).sum()
    return iteration_times_s[WARMUP_ITERATIONS:]


def _summarize_times(size_bytes: int, world_size: int, iteration_times_s: list[float]) -> dict[str, float]:
    """The fields of an AllReduceTime, by name. size_bytes: the size of the tensor in bytes. iteration_times_s: for each
    iteration, the seconds on the slowest rank."""
    median_s = statistics.median(iteration_times_s)
    bandwidth_gb_per_s = compute_bus_bandwidth(world_size, size_bytes, median_s) / 1e9
    return {
        "bytes": size_bytes,
        "seconds": median_s,
        "fastest_s": min(iteration_times_s),
        "slowest_s": max(iteration_times_s),
        "bus_bandwidth_gb_per_s": bandwidth_gb_per_s,
    }


if __name__ == "__main__":
    run_node_rank(*sys.argv[1:])
