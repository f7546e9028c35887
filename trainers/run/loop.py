"""The training loop. It is the same for all strategies and workloads, so that runs differ only in strategy and workload."""

from __future__ import annotations

import math
import os
import resource
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

import msgspec
import torch

from shardlab.errors import InputError
from shardlab.hardware import nccl_log
from shardlab.matrix.cell import Cell
from shardlab.runs import instrument_span
from shardlab.runs.record import SCHEMA, LineWriter, StepRecord
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from trainers import dtypes, menu
from trainers.data import node_copy
from trainers.data.order import TIMED, WARMUP, DataOrder
from trainers.data.prefetch import prefetch_results
from trainers.engine import Engine, Trainable
from trainers.instrument import RunInstruments, TrainTime
from trainers.instruments import environment, selection
from trainers.instruments.checkpoints import Checkpoints, ResumePoint
from trainers.instruments.faults import LostRank, StragglerDelay
from trainers.instruments.memory import MemoryMeter
from trainers.instruments.process_usage import ProcessUsage
from trainers.instruments.timing import DATA, OPTIMIZER, StepTimes, make_clock
from trainers.model import optimization
from trainers.proof import proof
from trainers.ranks import clock_check, hang_dump
from trainers.ranks.ranks import Peers, Ranks
from trainers.ranks.stage import note_stage
from trainers.run import result
from trainers.task import Batch, Task
from trainers.tasks.device_copy import SideStream

LOSS_SLOTS = 3  # number of host tensors for losses: of this step, of the previous step, and one in reserve
GIB = 2**30


def train(run: Run, run_dir: RunDir, ranks: Ranks) -> None:
    """Train as run.json says. Writes step records on every rank that trains, env/HOST.json on every host, and the result.

    Every rank initializes the same weights from the cell's seed. An epoch has floor(items / global_batch_size) steps, plus one
    short step if the engine has `has_short_steps`; in it, a rank without data records no loss and 0 units. The schedule of
    the learning rate covers all steps, also the untimed warm-up steps. Raises InputError if the cell cannot be trained.
    """
    with node_copy.stage_data(run, run_dir) as data_path:
        _train_on_data(run, run_dir, ranks, data_path)


def _train_on_data(run: Run, run_dir: RunDir, ranks: Ranks, data_path: Path) -> None:
    """Train as `train` says. data_path: the folder or file from which this rank reads its data."""
    cell = run.training_cell
    strategy, workload = menu.find_strategy_of_cell(cell), menu.find_workload_of_cell(cell)
    if (why := menu.refuse(cell)) is not None:
        raise InputError(why)
    if cell.instruments.checkpoints is not None and strategy.no_checkpoints:
        raise InputError(f"{cell.strategy} cannot save checkpoints: {strategy.no_checkpoints}.")
    if ranks.local_rank == 0:
        environment.write_environment(run_dir.environment_file(gethostname()), ranks)
    dtypes.set_tf32(cell.precision, ranks.device)
    task = workload.build(cell, data_path)
    order = DataOrder(task.source.items, cell.global_batch_size, cell.seed)
    proofs_folder = Path(run.proofs_path) if run.proofs_path else None
    with note_stage("proving"):
        same_work = proof.prove_same_work(cell, task, data_path, ranks, proofs_folder)
    torch.manual_seed(cell.seed)
    if strategy.servers and ranks.rank >= cell.gpus:
        strategy.build_server(cell, task, ranks).serve()
        return
    with note_stage("building"):
        if cell.memory_limit_gib is not None:
            _limit_memory(cell.memory_limit_gib, ranks.device)
        engine = strategy.build(cell, task, ranks)
        if engine.has_short_steps:
            order = order.with_short_step(cell.gpu_batch_size)
        # For dropout: ranks with different data get different seeds, ranks that share a model and its data get the same seed.
        torch.manual_seed(cell.seed + 1 + engine.data_rank)
        peers = engine.select_training_peers(ranks)
        instruments, resume_point = _create_instruments(run, run_dir, ranks, peers, task, engine, order)
    may_wait = not menu.find_strategy_of_cell(cell).tolerates_lost_ranks
    if may_wait:
        clock_check.measure_clock_offsets(run, run_dir, ranks, peers, "start")
    with note_stage("training"), LineWriter(run_dir.steps_file(ranks.rank)) as step_lines:
        recorder = Recorder(step_lines, resume_point.records if resume_point else ())
        delay = StragglerDelay(cell.instruments.straggler, ranks.rank, ranks.device)
        train_time_s = _run_steps(cell, task, order, engine, ranks.device, peers, recorder, instruments, resume_point, delay)
    if may_wait:
        clock_check.measure_clock_offsets(run, run_dir, ranks, peers, "end")
    # If the run resumed from a checkpoint of another cell's run, the records of the steps before the checkpoint are in that
    # other run. `first` is the number of these steps.
    first_step = resume_point.step if resume_point and not resume_point.records else 0
    rank_result = result.RankResult(
        train_time_s=train_time_s,
        loss=recorder.loss,
        peak_bytes=recorder.peak_bytes,
        step_ms=recorder.step_ms,
        watched_flags=recorder.watched_flags,
        items_by_step=[order.count_items(TIMED, first_step + step) for step in range(len(recorder.step_ms))],
        from_first_step=first_step == 0,
    )
    result.write_result(
        run, run_dir, ranks, peers, rank_result, engine, task, order.steps_per_epoch, same_work, instruments.collect_results(),
        resumed_from_step=resume_point.step if resume_point else None,
    )  # fmt: skip
    engine.close()


def _create_instruments(
    run: Run, run_dir: RunDir, ranks: Ranks, peers: Peers, task: Task, engine: Engine, order: DataOrder
) -> tuple[RunInstruments, ResumePoint | None]:
    """Create the instruments that the cell asks for, and load a checkpoint if the run resumes. Returns (the instruments, the
    point from which the run resumes, or None if it starts from step 0)."""
    cell, train_time = run.training_cell, TrainTime()
    may_wait = not menu.find_strategy_of_cell(cell).tolerates_lost_ranks
    instruments = selection.create_instruments(cell, task, engine, run_dir, ranks, peers, order, may_wait=may_wait)
    resume_point = None
    if (settings := cell.instruments.checkpoints) is not None:
        checkpoints = Checkpoints(settings, engine, run, run_dir, ranks, peers, order.steps_per_epoch, train_time)
        resume_point = checkpoints.resume()
        instruments.append(checkpoints)  # so late that a checkpoint is saved after all other instruments have run
    if cell.instruments.lost_worker is not None:
        instruments.append(LostRank(cell.instruments.lost_worker, ranks.rank, run_dir))
    write_act = partial(instrument_span.write_span, run_dir, ranks.rank)
    return RunInstruments(instruments, ranks.device, train_time, write_act), resume_point


def _run_steps(
    cell: Cell,
    task: Task,
    order: DataOrder,
    engine: Trainable,
    device: torch.device,
    peers: Peers,
    recorder: Recorder,
    instruments: RunInstruments,
    resume_point: ResumePoint | None = None,
    delay: StragglerDelay | None = None,
) -> float:
    """Run the warm-up steps, then the timed steps. Returns the wall-clock seconds of the timed steps on this rank, without the
    time of instruments between steps.

    A resumed run makes no warm-up steps. Instead, the same number of its first timed steps are marked as `is_watched`, so that
    their times do not count. If an instrument ends the run early, the exception of the instrument is raised.
    """
    first_step = resume_point.step if resume_point else 0
    settled_step = first_step + cell.warmup_steps if resume_point else 0
    phases = (
        (WARMUP, range(0 if resume_point else cell.warmup_steps)),
        (TIMED, range(first_step, order.count_timed_steps(cell))),
    )
    step_maker = StepMaker(cell, task, order, engine, device, phases, delay)
    for phase, steps in phases:
        peers.barrier()  # no rank starts its timed steps before all ranks are ready
        instruments.train_time.start()
        if phase == TIMED:
            print_log_mark(nccl_log.TIMED_STEPS_BEGIN)
        continues = False  # whether the step is timed from the end of the previous step, because no instrument ran between them
        for step in steps:
            is_watched = phase == TIMED and instruments.watches_step(step + 1)
            if is_watched:
                instruments.before_step(step + 1)
            is_slow = is_watched or (phase == TIMED and step < settled_step)
            recorder.add_step(step_maker.make_step(phase, step, is_watched=is_slow, continues=continues and not is_watched))
            if phase == WARMUP:
                continues = True
                continue
            continues = not instruments.is_due(step + 1)
            if not continues:
                recorder.write_remaining()  # a checkpoint needs the record of its last step
            instruments.after_step(step + 1)
            if instruments.ends_run(step + 1):
                recorder.write_remaining()
                exception = instruments.end_run(step + 1)
                engine.close()
                raise exception
        recorder.write_remaining()
    print_log_mark(nccl_log.TIMED_STEPS_END)
    step_maker.close()
    return instruments.train_time.read_seconds()


def print_log_mark(mark_text: str) -> None:
    """Print a mark into the log of this rank if NCCL logs its collectives there (NCCL_DEBUG_SUBSYS)."""
    if {"COLL", "ALL"}.intersection(os.environ.get("NCCL_DEBUG_SUBSYS", "").split(",")):
        print(mark_text, flush=True)


class StepMaker:
    """Makes the steps of a rank one after the other. The batches of the next step are fetched while this step computes."""

    def __init__(
        self,
        cell: Cell,
        task: Task,
        order: DataOrder,
        engine: Trainable,
        device: torch.device,
        phases: Sequence[tuple[int, range]],
        delay: StragglerDelay | None = None,
    ) -> None:
        """phases: the steps that will be made, in this order, as pairs (WARMUP or TIMED, range of step numbers). delay: slows
        this rank on purpose; None: not."""
        self._delay = delay
        self._cell, self._task, self._data_order, self._engine, self._device = cell, task, order, engine, device
        self._timed_steps = order.count_timed_steps(cell)
        self._clock, self._memory_meter, self._late_loss = make_clock(device), MemoryMeter(device), LateLoss(device)
        self._process_usage = ProcessUsage()
        self._side_stream = SideStream(device)
        self._fetched = prefetch_results(partial(self._fetch_batches, phase, step) for phase, steps in phases for step in steps)

    def _fetch_batches(self, phase: int, step: int) -> tuple[int, list[Batch], torch.cuda.Event | None]:
        """Fetch the batches of a step. Returns (number of units of data in this rank's batches, the batches, a CUDA event that
        completes when the batches are on the GPU)."""
        engine, micro_batch_size = self._engine, self._cell.micro_batch_size
        item_slices = self._data_order.list_micro_batches(
            phase, step, slice_index=engine.data_rank, slice_count=engine.data_ranks, micro_batch_size=micro_batch_size
        )
        with self._side_stream.use_stream():
            batches = [self._task.fetch(indices, self._device) for indices in item_slices]
        return sum(map(len, item_slices)) * self._task.units_per_item, batches, self._side_stream.record_copies()

    def make_step(self, phase: int, step: int, *, is_watched: bool, continues: bool) -> FinishedStep:
        """Make the next step.

        phase: WARMUP or TIMED. step: the number of the step in the phase, from 0. is_watched: whether to mark the step as
        slowed down by an instrument. continues: whether to time the step from the end of the previous step.
        """
        engine, clock = self._engine, self._clock
        self._set_learning_rate(phase, step)
        self._memory_meter.start()
        clock.start(continues=continues)
        units, batches, copy_event = next(self._fetched)
        self._side_stream.await_copies((tensor for batch in batches for tensor in (batch.inputs, batch.targets)), copy_event)
        if self._delay is not None:
            self._delay.wait()
        clock.mark(DATA)
        is_whole_batch = self._data_order.count_items(phase, step) == self._cell.global_batch_size
        with nullcontext() if is_whole_batch else engine.join_short_step():
            loss = self._late_loss.start_copy(engine.forward_backward(batches, clock)) if batches else None
            if batches:
                engine.update()
        if phase == TIMED and step + 1 == self._timed_steps:
            engine.finish()
        clock.mark(OPTIMIZER)
        return FinishedStep(
            step=step + 1,
            warmup=phase == WARMUP,
            watched=is_watched,
            t_s=time.monotonic(),
            wall_s=time.time(),
            units=units,
            step_times=clock.stop(),
            loss=loss,
            memory=self._memory_meter.read_sizes(),
            usage=self._process_usage.read(),
        )

    def _set_learning_rate(self, phase: int, step: int) -> None:
        cell, earlier_steps = self._cell, 0 if phase == WARMUP else self._cell.warmup_steps
        step_count = cell.warmup_steps + self._timed_steps
        learning_rate = optimization.compute_learning_rate(
            cell.optimizer, cell.schedule, earlier_steps + step, step_count, self._engine.data_ranks
        )
        optimization.set_learning_rate(self._engine.optimizer, learning_rate)

    def close(self) -> None:
        """Stop fetching batches and reading the counters of the process."""
        self._fetched.close()
        self._process_usage.close()


class LateLoss:
    """Copies losses from the GPU to pinned host tensors asynchronously, so that no step waits for a loss.

    The copy of a loss is queued right after the step, so that reading the copy does not wait for the next step.
    """

    def __init__(self, device: torch.device) -> None:
        is_on_gpu = device.type == "cuda"
        self._slots = [torch.empty((), pin_memory=True) for _ in range(LOSS_SLOTS)] if is_on_gpu else []
        self._next_slot = 0

    def start_copy(self, loss: torch.Tensor) -> torch.Tensor:
        """Start to copy a step's loss (0-dim, fp32) to the host; returns the host tensor.

        The tensor is valid after the last event of the step, for SLOTS - 1 further steps.
        """
        if not self._slots:
            return loss
        slot = self._slots[self._next_slot % LOSS_SLOTS]
        self._next_slot += 1
        return slot.copy_(loss, non_blocking=True)


class FinishedStep(msgspec.Struct):
    """A step that the host has finished; the device may still be computing it."""

    step: int
    warmup: bool
    watched: bool
    t_s: float
    wall_s: float
    units: int
    step_times: StepTimes
    loss: torch.Tensor | None
    """None on a rank without data in this step."""
    memory: dict[str, int]
    usage: dict[str, Any]


class Recorder:
    """Writes each step record as soon as the step's times and loss are known, at most one step later, so that training never
    waits for a record."""

    def __init__(self, step_lines: LineWriter, earlier_records: Sequence[StepRecord] = ()) -> None:
        """earlier_records: the records that are already in the file, if the run resumed from a checkpoint."""
        self._line_writer = step_lines
        self._finished_steps: deque[FinishedStep] = deque()
        self.step_ms: list[float] = []  # times of the timed steps
        self.watched_flags: list[bool] = []  # for each timed step, whether an instrument slowed it down
        self.loss = math.nan  # loss of the last step; NaN if this rank had no data in this step
        self.peak_bytes: dict[str, int] = {}
        for record in earlier_records:
            bytes_by_kind = {"allocated": record.allocated_bytes, "reserved": record.reserved_bytes, "rss": record.rss_bytes}
            self._count_record(record, {kind: size for kind, size in bytes_by_kind.items() if size is not None})

    def add_step(self, finished_step: FinishedStep) -> None:
        """Add a step. Writes the records of all steps before it, and its own record if its times are already known."""
        self._finished_steps.append(finished_step)
        while self._finished_steps and (len(self._finished_steps) > 1 or self._finished_steps[0].step_times.is_ready()):
            self._write_record(self._finished_steps.popleft())

    def write_remaining(self) -> None:
        """Wait for the device and write all remaining records."""
        while self._finished_steps:
            self._write_record(self._finished_steps.popleft())

    def _write_record(self, finished: FinishedStep) -> None:
        parts_ms = finished.step_times.read_parts_ms()
        step_ms, loss = sum(parts_ms.values()), None if finished.loss is None else float(finished.loss)
        if loss is not None and not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {finished.step}{' of the warm-up' * finished.warmup}")
        ms_by_field: dict[str, Any] = {f"{part}_ms": part_ms for part, part_ms in parts_ms.items()}
        bytes_by_field: dict[str, Any] = {f"{kind}_bytes": size for kind, size in finished.memory.items()}
        record = StepRecord(
            schema=SCHEMA,
            step=finished.step,
            t_s=finished.t_s,
            wall_s=finished.wall_s,
            loss=loss,
            units=finished.units,
            step_ms=step_ms,
            warmup=finished.warmup,
            watched=finished.watched,
            **ms_by_field,
            **bytes_by_field,
            **finished.usage,
        )
        self._line_writer.write_record(record)
        hang_dump.report_progress()
        self._count_record(record, finished.memory)

    def _count_record(self, record: StepRecord, bytes_by_kind: dict[str, int]) -> None:
        self.loss = math.nan if record.loss is None else record.loss
        if not record.warmup:
            self.step_ms.append(record.step_ms)
            self.watched_flags.append(record.watched)
        for kind, size in ({} if record.watched else bytes_by_kind).items():
            self.peak_bytes[kind] = max(size, self.peak_bytes.get(kind, 0))


def _limit_memory(limit_gib: float, device: torch.device) -> None:
    """Limit this process to `limit_gib` GiB of its GPU's memory from now on, before the model is built, so that a
    study can search on any machine for the largest model or batch that fits.

    On a CPU, the limit takes the place of the size of a GPU's memory: the process may allocate `limit_gib` GiB of private
    writable memory (RLIMIT_DATA, as the kernel counts it) in addition to the memory that it has now, with its libraries. Above
    the limit, torch raises an error that it cannot allocate memory.
    """
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total_bytes), device)
        return
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_read_counted_bytes() + int(limit_gib * GIB), hard_limit))


def _read_counted_bytes() -> int:
    """The bytes of this process that the kernel counts against RLIMIT_DATA now."""
    status_lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in status_lines if line.startswith("VmData:"))
    return int(kib) * 1024
