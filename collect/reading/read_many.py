"""Reads many runs, in several processes if they are LEAST_PARALLEL_RUNS or more.

The frames of many runs are made together, because making a frame takes about the same time for one run as for a hundred. The
processes send each other bytes: MessagePack, which can contain NaN (a possible value of a metric), and Arrow streams.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import repeat
from pathlib import Path

import msgspec
import polars as pl

from collect import metric
from collect.loading.loaded_run import LoadedRun
from collect.loading.records import Telemetry
from collect.loading.telemetry import Coverage
from collect.sources import samples, steps
from collect.sources.samples import Samples
from collect.sources.steps import StepFrames
from shardlab.runs.rundir import RunDir

MOST_RECORDS = 50_000  # step records and samples are moved into frames, which need less memory, when there are this many
LEAST_PARALLEL_RUNS = 2_000  # fewer are read by this process: a start of a process takes as long as reading 1,000 runs
RUNS_PER_TASK = 100  # few, so that Ctrl-C does not wait long and the ids fit into a pipe's buffer
MOST_PROCESSES = 4  # more would not help, because one process must receive the runs from all
# Errors of the pool of processes, after which this process reads the remaining runs itself: there is no memory for another
# process or for the runs that it sends; a value cannot be part of a message (text that is not UTF-8); or a process died while
# the next one was started, so that the pool closed a pipe of the next one (ValueError).
_POOL_ERRORS = (BrokenProcessPool, OSError, MemoryError, OverflowError, ValueError)

PackedRuns = list[bytes]  # a batch of runs as bytes: the runs with coverage, then three frames of steps, then four of samples


def read_runs(runs_dir: Path, run_ids: Sequence[str], telemetry: Telemetry = "read") -> Iterator[LoadedRun]:
    """Read these runs of the folder `runs_dir`, in the order of `run_ids`."""
    read_count = 0
    process_count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if len(run_ids) >= LEAST_PARALLEL_RUNS and process_count > 1:
        with contextlib.suppress(*_POOL_ERRORS):  # after an error of the pool, this process reads the remaining runs
            for run in _read_in_processes(runs_dir, run_ids, telemetry, process_count):
                read_count += 1
                yield run
    for batch in _read_batches(runs_dir, run_ids[read_count:], telemetry):
        _split_frames(batch, *_build_frames(batch))
        yield from batch


def _read_batches(runs_dir: Path, run_ids: Sequence[str], telemetry: Telemetry) -> Iterator[list[LoadedRun]]:
    batch: list[LoadedRun] = []
    record_count = 0
    for run_id in run_ids:
        batch.append(run := LoadedRun.read(RunDir(runs_dir / run_id), telemetry))
        record_count += run.record_count
        if record_count > MOST_RECORDS:
            yield batch
            batch, record_count = [], 0
    yield batch


def _build_frames(batch: Sequence[LoadedRun]) -> tuple[StepFrames, Samples]:
    """The frames of all runs of a batch. The column `run` contains the index of the run in the batch."""
    step_and_sample_frames = (
        steps.build_step_frames_of_runs([run.recorded_steps for run in batch]),
        samples.build_frames_of_runs([run.sample_records for run in batch], [run.sample_parts for run in batch]),
    )
    for run in batch:
        run.step_records, run.sample_records, run.sample_parts = {}, {}, []
    return step_and_sample_frames


def _split_frames(batch: Sequence[LoadedRun], step_frames: StepFrames, sample_frames: Samples) -> None:
    """Split the common frames of a batch: each run of the batch gets the rows that belong to it."""
    run_frames = zip(*(steps.split_rows_by_run(frame, len(batch)) for frame in (*step_frames, *sample_frames)), strict=True)
    for run, (all_steps, timed_steps, world_steps, *sample_rows) in zip(batch, run_frames, strict=True):
        run.step_frames, run.samples = StepFrames(all_steps, timed_steps, world_steps), Samples(*sample_rows)


def _read_in_processes(runs_dir: Path, run_ids: Sequence[str], telemetry: Telemetry, process_count: int) -> Iterator[LoadedRun]:
    task_run_ids = [run_ids[first_index : first_index + RUNS_PER_TASK] for first_index in range(0, len(run_ids), RUNS_PER_TASK)]
    spawn_context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of polars hold
    with ProcessPoolExecutor(process_count, spawn_context, initializer=_prepare_pool_process) as pool:
        for packed_batches in pool.map(read_and_pack, repeat(str(runs_dir)), task_run_ids, repeat(telemetry)):
            for packed_batch in packed_batches:
                yield from _unpack_runs(packed_batch)


def _prepare_pool_process() -> None:
    """Prepare a process of the pool. It ignores Ctrl-C, which its parent process handles, and exits when its parent has
    exited."""
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent_process = multiprocessing.parent_process()
    assert parent_process is not None

    def exit_with_parent() -> None:
        parent_process.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def read_and_pack(runs_dir: str, run_ids: Sequence[str], telemetry: Telemetry = "read") -> list[PackedRuns]:
    """Read runs in a process of the pool. Returns one packed batch for each batch of runs.

    The metrics of completed runs are computed in this process, too; but not those of profiled runs, which need the traces.
    """
    return [_pack_runs(batch) for batch in _read_batches(Path(runs_dir), run_ids, telemetry)]


def _pack_runs(batch: Sequence[LoadedRun]) -> PackedRuns:
    step_and_sample_frames = _build_frames(batch)
    _split_frames(batch, *step_and_sample_frames)
    for run in batch:
        if run.completed and not run.profiled:
            metric.compute_quantities(run)
    runs_with_coverage = [(run, run.coverage) for run in batch]
    packed_parts = [msgspec.msgpack.encode(runs_with_coverage, enc_hook=lambda folder: str(folder.path))]
    for packed_frame in (packed_frame for frame_group in step_and_sample_frames for packed_frame in frame_group):
        packed_frame.write_ipc_stream(arrow_stream := io.BytesIO())
        packed_parts.append(arrow_stream.getvalue())
    return packed_parts


def _unpack_runs(packed_parts: PackedRuns) -> list[LoadedRun]:
    runs_with_coverage = msgspec.msgpack.decode(
        packed_parts[0], type=list[tuple[LoadedRun, list[Coverage]]], dec_hook=lambda path_type, path: path_type(Path(path))
    )
    unpacked_frames = [pl.read_ipc_stream(frame_bytes) for frame_bytes in packed_parts[1:]]
    batch = [run for run, _ in runs_with_coverage]
    _split_frames(batch, StepFrames(*unpacked_frames[:3]), Samples(*unpacked_frames[3:]))
    for run, coverage in runs_with_coverage:
        run.coverage = coverage
    return batch
