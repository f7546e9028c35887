"""The two ranks of the acceptance test: sums of small integers, which float32 holds exactly, so that equality is the test.

``python -m provision.checks._all_reduce_ranks launch BACKEND RANKS`` starts them by torchrun.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

ELEMENTS = 4 * 2**20  # of 4 bytes: 16 MiB, large enough that bandwidth and not latency is measured
ITERATIONS = 5
WARMUP = 2


def launch(backend: str, ranks: str) -> None:
    """Run the ranks under torchrun, which leaves a folder of logs behind wherever it is not given one."""
    with tempfile.TemporaryDirectory(prefix="shardlab-") as logs:
        # Port 0 lets the kernel choose a free one.
        meet = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        torchrun([*meet, f"--nproc-per-node={ranks}", f"--log-dir={logs}", "-m", __spec__.name, "rank", backend])


def meet(backend: str, nodes: str, place: str, endpoint: str) -> None:
    """One rank of as many as there are nodes; the first listens at `endpoint`."""
    host, port = endpoint.rsplit(":", 1)
    os.environ |= {"RANK": place, "WORLD_SIZE": nodes, "LOCAL_RANK": "0", "MASTER_ADDR": host, "MASTER_PORT": port}
    work(backend)


def work(backend: str) -> None:
    """One rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
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
    dist.all_reduce(times, op=dist.ReduceOp.MAX)  # an all-reduce has ended when its slowest rank has
    if rank == 0:
        report = {
            "backend": backend,
            "ranks": ranks,
            "bytes": ELEMENTS * 4,
            "wrong": int(wrong.item()),
            "iterations": ITERATIONS,
            "time_s": statistics.median(times[WARMUP:].tolist()),
        }
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(sys.argv[2], sys.argv[3])
    elif sys.argv[1] == "meet":
        meet(*sys.argv[2:])
    else:
        work(sys.argv[2])
