"""Trains a small model as a script of a user does, in forked gloo ranks, and tells checksums of its weights.

    python support_checksums.py FOLDER STRATEGY RANKS [wrong] [adamw]

FOLDER is the folder of a run. All strategies train on the same 8 items in each step. wrong: each rank adds up the gradients of
its items, so the gradient is too large.
"""

import os
import signal
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from support_rank_processes import fork_ranks
from torch import nn

from shardlab import steps

ITEMS, STEPS = 8, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, 33)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(33, 21), nn.Tanh(), nn.Linear(21, 33)) for _ in range(2))
        self.head = nn.Linear(33, 5)

    def forward(self, inputs):
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def wrap(model, strategy):
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if strategy.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        sharding = ShardingStrategy.NO_SHARD if strategy == "fsdp1-no-shard" else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), device_id=torch.device("cpu"),
            sharding_strategy=sharding, use_orig_params=strategy != "fsdp1-flat",
        )  # fmt: skip
    if strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def train_with_zero(model, stage, batches):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    settings = {
        "train_micro_batch_size_per_gpu": ITEMS // dist.get_world_size(), "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1.0 by default, which is other work
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    steps.checksum(engine, optimizer=optimizer, step=0)
    for step, (inputs, targets) in enumerate(batches, 1):
        engine.backward(nn.functional.cross_entropy(engine(inputs), targets))
        engine.step()
        steps.report(step=step)
    steps.checksum(engine)


def work_as_rank(rank, **settings):
    """Train, and end at the first failure, so that no rank waits for this one: the parent prints nothing of it."""
    try:
        train(rank, **settings)
    except BaseException:
        traceback.print_exc()
        os.killpg(0, signal.SIGTERM)
        raise


def train(rank, folder, strategy, ranks, options):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks)):
        os.environ[name] = str(value)
    for variable, subfolder in ((steps.FOLDER_VARIABLE, "steps"), (steps.CHECKSUMS_VARIABLE, "checksums")):
        os.environ[variable] = str(folder / subfolder)
        (folder / subfolder).mkdir(exist_ok=True)
    if ranks > 1 or strategy.startswith("zero"):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(3)
    model, share = Net(), ITEMS // ranks
    batches = [(torch.randn(ITEMS, 7), torch.randint(5, (ITEMS,))) for _ in range(STEPS)]
    batches = [tuple(part[rank * share : (rank + 1) * share] for part in batch) for batch in batches]
    if strategy.startswith("zero"):
        train_with_zero(model, int(strategy[-1]), batches)
    else:
        model = wrap(model, strategy)
        parameters = list(model.parameters())
        optimizer = (
            torch.optim.AdamW(parameters, 1e-2) if "adamw" in options else torch.optim.SGD(parameters, 0.1, momentum=0.9)
        )
        steps.checksum(model, optimizer=optimizer)
        for step, (inputs, targets) in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            (loss * ranks if "wrong" in options else loss).backward()
            optimizer.step()
            steps.report(step=step, loss=loss)
        steps.checksum(model, optimizer=optimizer)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    os.setpgrp()  # so that a rank that fails can end all ranks, and nothing else
    run_folder, strategy_name, count, *words = sys.argv[1:]
    fork_ranks(
        int(count), partial(work_as_rank, folder=Path(run_folder), strategy=strategy_name, ranks=int(count), options=words)
    )
