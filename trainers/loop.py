"""The one training loop: it names no strategy and no workload, so that what is compared differs in nothing else."""

from __future__ import annotations

import math
import time
from collections import deque
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

import msgspec
import torch

from shardlab.cell import Cell
from shardlab.errors import InputError
from shardlab.record import SCHEMA, LineWriter, StepRecord
from shardlab.run import Run
from shardlab.rundir import RunDir
from trainers import instruments, memory_limit, menu, optimization, outcome, precision, proof
from trainers.data.order import TIMED, WARMUP, Order
from trainers.data.prefetch import prefetched
from trainers.instrument import Watch
from trainers.instruments import environment
from trainers.instruments.memory import MemoryMeter
from trainers.instruments.timing import DATA, OPTIMIZER, Reading, clock_for
from trainers.ranks import Company, Ranks
from trainers.strategy import Engine
from trainers.workload import Batch, Task


def train(run: Run, run_dir: RunDir, ranks: Ranks) -> None:
    """Train as run.json says and leave step records on every rank that trains, env/HOST.json on every host, and the result.

    The weights are drawn from the cell's seed on every rank alike. An epoch is floor(items / global_batch_size) steps.
    The learning rate runs over all steps, the untimed warm-up steps included. Raises InputError for a cell that
    cannot be trained.
    """
    cell = run.cell
    strategy, workload = menu.strategy(cell.strategy), menu.workload(cell.workload)
    if (why := strategy.refuse_precision(cell.precision) or strategy.refuse(cell)) is not None:
        raise InputError(why)
    if ranks.local_rank == 0:
        environment.write(run_dir.environment(gethostname()), ranks)
    precision.set_tf32(cell.precision)
    task = workload.build(cell, Path(run.data_path))
    order = Order(task.source.items, cell.global_batch_size, cell.seed)
    proofs = Path(run.proofs_path) if run.proofs_path else None
    same_work = proof.prove(cell, task, Path(run.data_path), ranks, proofs)
    if cell.memory_limit_gib is not None:
        memory_limit.hold(cell.memory_limit_gib, ranks.device)
    torch.manual_seed(cell.seed)
    if strategy.server is not None and ranks.rank >= cell.gpus:
        strategy.server(cell, task, ranks).serve()
        return
    engine = strategy.build(cell, task, ranks)
    torch.manual_seed(cell.seed + 1 + engine.data_rank)  # dropout: apart where the data is, alike on ranks that share a model
    company = engine.company(ranks)
    meets = not strategy.tolerates_lost_ranks
    watch = Watch(instruments.chosen(cell, task, engine, run_dir, ranks, company, order, meets=meets), ranks.device)
    with LineWriter(run_dir.steps_file(ranks.rank)) as lines:
        recorder = Recorder(lines)
        train_time_s = _steps(cell, task, order, engine, ranks.device, company, recorder, watch)
    mine = outcome.OfRank(
        train_time_s=train_time_s,
        loss=recorder.loss,
        peak_bytes=recorder.peak_bytes,
        step_ms=recorder.step_ms,
        watched=recorder.watched,
    )
    outcome.write(run, run_dir, ranks, company, mine, engine, task, order.steps_per_epoch, same_work, watch.found())
    engine.close()


def _steps(
    cell: Cell,
    task: Task,
    order: Order,
    engine: Engine,
    device: torch.device,
    company: Company,
    recorder: Recorder,
    watch: Watch,
) -> float:
    """Run the warm-up steps, then the timed ones; seconds that the timed ones took by this rank's wall clock, what
    instruments took between them left out."""
    clock, memory = clock_for(device), MemoryMeter(device)
    timed = order.timed_steps(cell)
    phases = ((WARMUP, cell.warmup_steps, 0), (TIMED, timed, cell.warmup_steps))

    def fetch(phase: int, step: int) -> tuple[int, list[Batch]]:
        parts = order.micro_batches(phase, step, part=engine.data_rank, parts=engine.data_ranks, size=cell.micro_batch_size)
        return sum(map(len, parts)) * task.units_per_item, [task.fetch(indices, device) for indices in parts]

    coming = prefetched(partial(fetch, phase, step) for phase, count, _ in phases for step in range(count))
    started = 0.0
    for phase, count, before in phases:
        company.barrier()  # no rank's timed steps start while another still sets up
        started = time.perf_counter()
        for step in range(count):
            watched = phase == TIMED and watch.watches(step + 1)
            if watched:
                watch.before(step + 1)
            rate = optimization.learning_rate(
                cell.optimizer, cell.schedule, before + step, cell.warmup_steps + timed, engine.data_ranks
            )
            optimization.set_learning_rate(engine.optimizer, rate)
            memory.start()
            clock.start()
            units, batches = next(coming)
            clock.mark(DATA)
            loss = engine.forward_backward(batches, clock)
            engine.update()
            clock.mark(OPTIMIZER)
            recorder.add(
                Passed(
                    step=step + 1,
                    warmup=phase == WARMUP,
                    watched=watched,
                    t_s=time.monotonic(),
                    wall_s=time.time(),
                    units=units,
                    reading=clock.stop(),
                    loss=loss,
                    memory=memory.read(),
                )
            )
            if phase == TIMED:
                watch.after(step + 1)
        recorder.settle()
    coming.close()
    return time.perf_counter() - started - watch.between_s()


class Passed(msgspec.Struct):
    """A step that the host has passed and the device may still be working on."""

    step: int
    warmup: bool
    watched: bool
    t_s: float
    wall_s: float
    units: int
    reading: Reading
    loss: torch.Tensor
    memory: dict[str, int]


class Recorder:
    """Writes step records as soon as their times are there, at most one step late, so that no step waits for its record."""

    def __init__(self, lines: LineWriter) -> None:
        self._lines = lines
        self._passed: deque[Passed] = deque()
        self.step_ms: list[float] = []  # of the timed steps
        self.watched: list[bool] = []  # which of them an instrument slowed down
        self.loss = math.nan  # of the last step
        self.peak_bytes: dict[str, int] = {}

    def add(self, passed: Passed) -> None:
        """Take a step, and write those whose times are known, or that lie a step back."""
        self._passed.append(passed)
        while self._passed and (len(self._passed) > 1 or self._passed[0].reading.ready()):
            self._write(self._passed.popleft())

    def settle(self) -> None:
        """Wait for the device and write what is left."""
        while self._passed:
            self._write(self._passed.popleft())

    def _write(self, passed: Passed) -> None:
        parts = passed.reading.parts_ms()
        step_ms, self.loss = sum(parts.values()), float(passed.loss)
        if not math.isfinite(self.loss):
            raise FloatingPointError(f"the loss is {self.loss} at step {passed.step}{' of the warm-up' * passed.warmup}")
        if not passed.warmup:
            self.step_ms.append(step_ms)
            self.watched.append(passed.watched)
        for kind, size in ({} if passed.watched else passed.memory).items():
            self.peak_bytes[kind] = max(size, self.peak_bytes.get(kind, 0))
        times: dict[str, Any] = {f"{part}_ms": part_ms for part, part_ms in parts.items()}
        sizes: dict[str, Any] = {f"{kind}_bytes": size for kind, size in passed.memory.items()}
        record = StepRecord(
            schema=SCHEMA,
            step=passed.step,
            t_s=passed.t_s,
            wall_s=passed.wall_s,
            loss=self.loss,
            units=passed.units,
            step_ms=step_ms,
            warmup=passed.warmup,
            watched=passed.watched,
            **times,
            **sizes,
        )
        self._lines.write(record)
