"""Checks that run inside a process with fake GPUs, without a launcher."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from fake_cuda.waits import Waits
from shardlab.matrix.cell import Cell
from shardlab.runs.record import LineWriter
from trainers import dtypes, menu
from trainers.data.order import DataOrder
from trainers.instrument import RunInstruments
from trainers.instruments.timing import make_clock
from trainers.parallel.mesh_model import MeshModel
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks
from trainers.run import loop
from trainers.task import Task

HELD_BYTES = 1 << 28  # more than the models of the tests need


def waits(cell: dict[str, Any], data: str) -> dict[str, int]:
    """How often the host of rank 0 waits for its GPU in the timed steps, by the source line that waits."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    asked = msgspec.convert(cell, Cell)
    ranks = Ranks(Rank()) if asked.gpus == 1 else _rank_0_of(asked.gpus)
    dtypes.set_tf32(asked.precision, ranks.device)
    task = menu.find_workload(asked.workload).build(asked, Path(data))
    order = DataOrder(task.source.items, asked.global_batch_size, asked.seed)
    torch.manual_seed(asked.seed)
    engine = menu.find_strategy(asked.strategy).build(asked, task, ranks)
    step, passed = engine.forward_backward, 0
    with tempfile.TemporaryDirectory() as folder, LineWriter(Path(folder) / "steps.jsonl") as lines:
        recorder, watch, found = loop.Recorder(lines, ()), RunInstruments([], ranks.device), Waits(counting=False)

        def counted(*args: Any) -> torch.Tensor:
            nonlocal passed
            passed += 1
            found.counting = passed > asked.warmup_steps
            return step(*args)

        settle = recorder.write_remaining

        def settled() -> None:  # called after the last step, where the host must wait for the GPU to finish
            found.counting = False
            settle()

        engine.forward_backward, recorder.write_remaining = counted, settled
        with found:
            loop._run_steps(asked, task, order, engine, ranks.device, engine.select_training_peers(ranks), recorder, watch)
    engine.close()
    ranks.leave_group()
    return dict(found.lines)


def one_gpu(cell: dict[str, Any], data: str, index: int, local_rank: int) -> dict[str, Any]:
    """Three steps of the only rank of a run, whose GPU is not the GPU with the number of its local rank.

    index: the number of the GPU. local_rank: the number of the rank on its node. Before the steps, the rank holds `held` bytes
    for a moment. Returns the memory in use after the steps on each GPU, the peak and the loss of each step, and how often the
    GPU waits for a copied batch.
    """
    os.environ.update({"RANK": "0", "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    asked = msgspec.convert(cell, Cell)
    ranks = Ranks(Rank(local_rank=index))
    ranks.local_rank = local_rank
    task = menu.find_workload(asked.workload).build(asked, Path(data))
    torch.manual_seed(asked.seed)
    engine = menu.find_strategy(asked.strategy).build(asked, task, ranks)
    held = torch.empty(HELD_BYTES, dtype=torch.uint8, device=ranks.device)
    del held
    waits = 0

    def wait_event(self: Any, event: Any) -> None:
        nonlocal waits
        waits += 1

    torch.cuda.Stream.wait_event = wait_event
    order = DataOrder(task.source.items, asked.global_batch_size, asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        with LineWriter(path) as lines:
            recorder, watch = loop.Recorder(lines, ()), RunInstruments([], ranks.device)
            loop._run_steps(asked, task, order, engine, ranks.device, engine.select_training_peers(ranks), recorder, watch)
        records = [json.loads(line) for line in path.read_text().splitlines()]
    used = {number: torch.cuda.memory_allocated(number) for number in range(torch.cuda.device_count())}
    return {
        "used_on": [number for number, size in used.items() if size],
        "peaks": [record["allocated_bytes"] for record in records],
        "losses": [record["loss"] for record in records],
        "held": HELD_BYTES,
        "waits": waits,
    }


def _rank_0_of(world: int) -> Ranks:
    """Rank 0 of a world whose other ranks do not exist.

    The fake process group of torch returns from each collective at once, with undefined values.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    ranks = Ranks.__new__(Ranks)
    ranks.rank = ranks.local_rank = 0
    ranks.world_size, ranks.trains_on, ranks.backend = world, "cuda", "nccl"
    ranks.device = torch.device("cuda:0")
    ranks.all_gather_numbers = lambda numbers: np.tile(np.array(numbers, dtype=float), (world, 1))
    ranks.leave_group = lambda: None
    return ranks


def one_rank_of(world: int, cell: dict[str, Any], data: str) -> dict[str, float]:
    """GPU memory of rank 0 in bytes: the peak while building the model, the memory after building, the peak in two steps.

    world: the number of ranks; the other ranks do not exist.
    """
    asked, ranks, task, found = _before_building(world, cell, data)
    engine = menu.find_strategy(asked.strategy).build(asked, task, ranks)
    found |= _built()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        clock = make_clock(ranks.device)
        clock.start()
        engine.forward_backward([task.fetch(np.zeros(asked.micro_batch_size, np.int64), ranks.device)], clock)
        engine.update()
    return {**found, "stepping": torch.cuda.max_memory_allocated()}


def one_stage_of(world: int, cell: dict[str, Any], data: str) -> dict[str, float]:
    """GPU memory of the first stage of a pipeline in bytes: the keys of `one_rank_of`, except the peak in two steps.

    No step is made, because it would wait for the second stage, which does not exist.
    """
    asked, ranks, task, found = _before_building(world, cell, data)
    stage = MeshModel(asked, task, ranks, stages=world)
    return {**found, **_built(), "stages": len(stage.stage_modules)}


def _before_building(world: int, cell: dict[str, Any], data: str) -> tuple[Cell, Ranks, Task, dict[str, float]]:
    asked, ranks = msgspec.convert(cell, Cell), _rank_0_of(world)
    task = menu.find_workload(asked.workload).build(asked, Path(data))
    weights = sum(p.numel() * 4 for p in task.model().parameters())
    block = max(sum(p.numel() * 4 for p in one.parameters()) for one in task.blocks(task.model()))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(asked.seed)
    return asked, ranks, task, {"weights": weights, "block": block}


def _built() -> dict[str, float]:
    building = torch.cuda.max_memory_allocated()
    gc.collect()
    return {"building": building, "built": torch.cuda.memory_allocated()}
