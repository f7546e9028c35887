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

ELEMENTS = 4 * 2**20  # elements of a rank's tensor: 16 MiB, so that the test measures bandwidth and not latency
ITERATIONS = 5
WARMUP = 2


def meet(backend: str, nodes: str, place: str, endpoint: str, *, gpu: int | None = None) -> None:
    """Run the rank of this node in a test with one rank per node.

    nodes: the number of nodes, in decimal. place: the rank of this node, in decimal. endpoint: HOST:PORT where rank 0 listens.
    gpu: the index of the GPU that the rank uses; None: the index is the rank.
    """
    host, port = endpoint.rsplit(":", 1)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    work(backend, int(place), int(nodes), "env://", gpu)


def work(backend: str, rank: int, ranks: int, meeting: str, gpu: int | None = None) -> None:
    """Run one rank of the all-reduce test. Rank 0 prints an AllReduceReport as JSON.

    ranks: the number of ranks. meeting: the init_method of torch.distributed.
    gpu: the index of the GPU that the rank uses; None: the index is the rank.
    """
    device = torch.device("cuda", rank if gpu is None else gpu) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=180))
    base = torch.arange(ELEMENTS, device=device, dtype=torch.float32).remainder_(1024)
    expected = base * ranks + ranks * (ranks - 1) / 2
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    times = torch.zeros(WARMUP + ITERATIONS, dtype=torch.float64, device=device)
    for iteration in range(WARMUP + ITERATIONS):
        values = base + rank
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times[iteration] = time.perf_counter() - begin
        wrong += (values != expected).sum()
    dist.all_reduce(wrong)
    dist.barrier()
    clock = torch.tensor([time.time(), -time.time()], dtype=torch.float64, device=device)
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)  # an all-reduce takes as long as its slowest rank
    if rank == 0:
        report = {
            "backend": backend,
            "ranks": ranks,
            "bytes": ELEMENTS * 4,
            "wrong": int(wrong.item()),
            "iterations": ITERATIONS,
            "time_s": statistics.median(times[WARMUP:].tolist()),
            "clock_spread_s": float(clock.sum()),
        }
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    meet(*sys.argv[1:])
