"""Forks two profiled gloo ranks, which write FOLDER/rank-0000N.json.gz. Usage: python support_gloo.py FOLDER"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from support_rank_processes import fork_ranks
from torch.profiler import ProfilerActivity, profile, record_function

STEPS, WORLD = 2, 2


def train(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(STEPS):
            with record_function(f"ProfilerStep#{step}"):
                model(torch.ones(8, 64)).sum().backward()
                half, whole = torch.zeros(4096), torch.ones(4096 * WORLD)
                dist.reduce_scatter_tensor(half, whole)
                pending = dist.isend(torch.ones(512), 1) if rank == 0 else dist.irecv(torch.zeros(512), 0)
                torch.ones(200, 200) @ torch.ones(200, 200)  # compute while the message is being sent
                pending.wait()
    profiler.export_chrome_trace(str(folder / f"rank-{rank:05d}.json.gz"))
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(WORLD, partial(train, folder=Path(sys.argv[1])))
