"""Rehearses a cell: builds its engine on fake tensors, once for each kind of rank, and counts a step."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch

from shardlab.cell import Cell
from shardlab.errors import InputError
from trainers import dtypes, menu
from trainers.instruments.timing import clock_for
from trainers.rehearsal import counted_step
from trainers.rehearsal.counted_step import CountedStep
from trainers.rehearsal.fake_group import FakeRanks, fake_group, give_hook, neighbours
from trainers.rehearsal.fake_tensors import fake_tensors

if True:
    from trainers.engine import Engine
    from trainers.task import Batch, Task

# Steps until one step is like the next: the first allocates the optimizer's state, DistributedDataParallel makes its buckets
# anew in the second, PowerSGD makes two exact steps, and DeepSpeed's stage 3 compares the order of modules among ranks.
FIRST_STEPS = {"ddp": 2, "ddp-powersgd": 4, "zero3": 3}


def step_of(cell: Cell, rank: int, data_path: Path) -> CountedStep:
    """A step of one rank after the first steps."""
    strategy, workload = menu.strategy(cell.strategy), menu.workload_of(cell)
    task = workload.build(cell, data_path)
    with fake_group(rank, cell.world_size) as ranks, fake_tensors() as mode, neighbours(lambda: _hidden(cell, task)):
        torch.manual_seed(cell.seed)
        engine = strategy.build(cell, task, ranks)
        give_hook(engine.model)
        clock = clock_for(ranks.device)
        batches = [mode_batch(mode, task, cell) for _ in range(cell.gradient_accumulation_steps)]
        for _ in range(FIRST_STEPS.get(cell.strategy, 1)):
            clock.start()
            engine.forward_backward(batches, clock)
            engine.update()
        return counted_step.count(engine, batches, clock)


def mode_batch(mode, task, cell):
    batch = task.fetch(np.arange(cell.micro_batch_size) % task.source.items, torch.device("cpu"))
    return Batch(mode.from_tensor(batch.inputs), mode.from_tensor(batch.targets))


def _hidden(cell: Cell, task: Task) -> torch.Tensor:
    """The hidden state of a micro-batch between two blocks."""
    return torch.empty(cell.micro_batch_size, *task.plan().hidden, dtype=dtypes.stream_dtype(cell.precision))
