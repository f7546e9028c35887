"""Rehearses a cell: builds its engine on fake tensors for each kind of rank, makes steps, and counts one.

Each step has a forked process of its own, several at a time: torch and DeepSpeed remember process groups, so in one process, a
step of another rank would get the groups of the previous rank. A fork takes a tenth of a second; the imports of a new process
would take seconds.
"""

from __future__ import annotations

import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardlab.errors import InputError
from shardlab.matrix.cell import Cell
from shardlab.plugins import own_code
from shardlab.runs.rehearsed import (
    SCHEMA,
    MemoryByCategory,
    NotRehearsed,
    RehearsalAnswer,
    Rehearsed,
    RehearsedCollective,
    RehearsedRank,
)
from trainers import dtypes, menu
from trainers.instruments.timing import make_clock
from trainers.rehearsal import counted_step, depths
from trainers.rehearsal.counted_step import CountedStep
from trainers.rehearsal.fake_group import FakeRanks, infer_neighbour_shapes, register_averaging_hook, use_fake_group
from trainers.rehearsal.fake_tensors import make_fake, use_fake_tensors, with_real_tensors
from trainers.rehearsal.substitutes import make_synthetic_task, refuse_rehearsal, substitute_settings
from trainers.run.process import summarize_error
from trainers.task import Batch

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trainers.task import Task
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from shardlab.errors import ShardlabError
from shardlab.hardware import host

# The number of steps before the counted step, for strategies that need more than one step until all further steps are equal.
# The first step allocates the optimizer's state. DDP makes new buckets in its second step, PowerSGD makes two exact steps, and
# stage 3 of DeepSpeed compares the order of modules among ranks.
FIRST_STEPS = {"ddp": 2, "ddp-powersgd": 4, "zero3": 3}
MOST_FIRST_STEPS = max(FIRST_STEPS.values())
NO_VALUES = (
    "A rehearsal has the shapes of tensors and not their values. Needed: model() and loss() without numpy, and without shapes "
    "that depend on values, such as outputs[mask]; torch.where or a product with the mask can replace them."
)
ERROR_PCT = 1.1
"""The largest difference of peak_bytes from the peak that torch's CPU allocator counted, in percent of the counted peak."""
ERROR_FROM = "on 16 cells of tiny models with 14 strategies, against the allocations of real steps on a CPU"
EXTRAPOLATED_PCT = 2.0
"""The error in percent that the extrapolation to the cell's number of blocks may add. The tests check this limit. The measured
error was less than 0.01 percent for FSDP1, FSDP2, DDP and tensor parallelism."""


def rehearse_cell(cell: Cell, data_path: Path, *, full_depth: bool) -> RehearsalAnswer:
    """Rehearse a cell and return the result. full_depth: whether to rehearse a deep model with all its blocks. data_path: a
    folder for data that tasks make, such as a text. If a library raises an error, the result says that the rehearsal failed."""
    start_s = time.perf_counter()
    try:
        if (why := menu.refuse(cell) or refuse_rehearsal(cell)) is not None:
            return NotRehearsed(SCHEMA, cell.hash(), why, time.perf_counter() - start_s)
        rehearsed_cell, remarks = substitute_settings(cell)
        depth_pair = None if full_depth else depths.choose_depths(rehearsed_cell)
        ranks = _rehearse_ranks(rehearsed_cell, data_path, depth_pair)
    except Exception as error:  # noqa: BLE001 - a library may fail on fake tensors; the planner then uses its formula
        traceback.print_exception(error)
        return NotRehearsed(
            SCHEMA, cell.hash(), f"the rehearsal failed: {summarize_error(error)}", time.perf_counter() - start_s
        )
    return Rehearsed(
        schema=SCHEMA,
        cell=cell.hash(),
        world_size=cell.world_size,
        ranks=ranks,
        how="fake_tensors",
        device="cpu",
        depths=depth_pair,
        error_pct=ERROR_PCT if depth_pair is None else ERROR_PCT + EXTRAPOLATED_PCT,
        error_from=ERROR_FROM,
        remarks=tuple(remarks),
        seconds=time.perf_counter() - start_s,
    )


def _list_rehearsed_ranks(cell: Cell) -> list[tuple[int, int]]:
    """The ranks that are rehearsed, one for each stage of the pipeline, as (rank, number of ranks with the same stage). The
    first rank of a stage has the largest part of its parameters. Parameter servers use no GPU and are left out."""
    same_stage_ranks = cell.gpus // cell.pp
    return [(stage * same_stage_ranks, same_stage_ranks) for stage in range(cell.pp)]


def _rehearse_ranks(cell: Cell, data_path: Path, depth_pair: tuple[int, int] | None) -> tuple[RehearsedRank, ...]:
    """The results for each kind of rank. depth_pair: the two rehearsed numbers of blocks; None: no extrapolation."""
    rehearsed_ranks = _list_rehearsed_ranks(cell)
    cells = [cell] if depth_pair is None else [depths.make_cell_at_depth(cell, blocks) for blocks in depth_pair]
    count_tasks = [
        partial(_count_step_of_rank, shallow_cell, data_path, rank) for rank, _ in rehearsed_ranks for shallow_cell in cells
    ]
    counted_steps = rehearse_steps(count_tasks)
    if depth_pair is None:
        step_results = [(step, depths.to_rehearsed_collectives(dict(step.calls))) for step in counted_steps]
    else:
        depth_line = depths.DepthExtrapolation(depth_pair, cell)
        depth_steps = zip(counted_steps[::2], counted_steps[1::2], strict=True)
        step_results = [
            (depth_line.extrapolate_step(low, high), depth_line.extrapolate_collectives(dict(low.calls), dict(high.calls)))
            for low, high in depth_steps
        ]
    return tuple(
        _make_rank_result(rank, same_stage_ranks, step, collectives)
        for (rank, same_stage_ranks), (step, collectives) in zip(rehearsed_ranks, step_results, strict=True)
    )


def _make_rank_result(
    rank: int, equal_ranks: int, step: CountedStep, collectives: tuple[RehearsedCollective, ...]
) -> RehearsedRank:
    peak_memory = max(step.peaks.values(), key=lambda memory: sum(memory.values()))
    return RehearsedRank(
        rank=rank,
        stands_for=equal_ranks,
        peak_bytes=sum(peak_memory.values()),
        at_peak=MemoryByCategory(**peak_memory),
        kept=MemoryByCategory(**step.memory_after),
        collectives=collectives,
        flops=step.flops,
    )


def _count_step_of_rank(cell: Cell, data_path: Path, rank: int) -> CountedStep:
    """Make the counted step of the rank with this number, in a fake process group. Raises InputError, which names the line, if
    the user's code cannot compute with fake tensors."""
    try:
        with use_fake_group(rank, cell.world_size) as ranks:
            return rehearse_step(cell, data_path, ranks)
    except RuntimeError as error:
        workload_file = menu.find_workload_of_cell(cell).file
        if workload_file is None or own_code.find_error_line(error, Path(workload_file).parent) is None:
            raise
        raise InputError(f"{own_code.describe_error(workload_file, error)} {NO_VALUES}") from error


def rehearse_step(cell: Cell, data_path: Path, ranks: FakeRanks) -> CountedStep:
    """Build the engine of this rank on fake tensors, make the first steps, and count the next step."""
    task = make_synthetic_task(cell, data_path)
    build_model = task.model
    with use_fake_tensors() as mode, infer_neighbour_shapes(lambda: _make_fake_hidden(cell, task)):
        for name in ("fetch", "plan"):  # both read data, and the user's function `batch` may read it with any library
            setattr(task, name, with_real_tensors(getattr(task, name)))
        task.model = lambda: make_fake(build_model(), mode)  # type: ignore[method-assign]
        torch.manual_seed(cell.seed)
        strategy = menu.find_strategy_of_cell(cell)
        engine, clock = strategy.build(cell, task, ranks), make_clock(ranks.device)
        register_averaging_hook(engine.model)
        batches = [_make_fake_batch(mode, task, cell) for _ in range(cell.gradient_accumulation_steps)]
        for _ in range(_count_first_steps(cell)):
            clock.start()
            engine.forward_backward(batches, clock)
            engine.update()
        return counted_step.count_step(engine, batches, clock, period=strategy.communication_period(cell) or 1)


def _count_first_steps(cell: Cell) -> int:
    """The number of steps before the counted step. A strategy of the workspace may use any engine, so the largest number of
    all strategies is used."""
    if cell.strategy_code is not None:
        return MOST_FIRST_STEPS
    # The first step of SGD makes the momentum. Only the second step has the operators of all later steps.
    return max(FIRST_STEPS.get(cell.strategy, 1), 2 if cell.optimizer.name == "sgd" else 1)


def _make_fake_batch(mode: FakeTensorMode, task: Task, cell: Cell) -> Batch:
    """A micro-batch of fake tensors, with the shapes of the task's data."""
    batch = task.fetch(np.arange(cell.micro_batch_size) % task.source.items, torch.device("cpu"))
    return Batch(mode.from_tensor(batch.inputs), mode.from_tensor(batch.targets))


def _make_fake_hidden(cell: Cell, task: Task) -> torch.Tensor:
    """A tensor with the shape and dtype of the hidden state of a micro-batch between two blocks."""
    return torch.empty(cell.micro_batch_size, *task.plan().hidden_shape, dtype=dtypes.stream_dtype(cell.precision))


class StepFailed(ShardlabError):
    """Raised if a step could not be rehearsed. The message is the error of the process that rehearsed the step."""


def rehearse_steps(steps: Sequence[Callable[[], CountedStep]]) -> list[CountedStep]:
    """Call functions that each rehearse a step, in forked processes. Returns their results in the same order. Raises StepFailed
    if a function fails."""
    with tempfile.TemporaryDirectory(prefix="shardlab-rehearsal-") as folder:
        waiting_steps, step_by_child = deque(range(len(steps))), dict[int, int]()
        try:
            while waiting_steps or step_by_child:
                while waiting_steps and len(step_by_child) < host.count_usable_processors():
                    step_number = waiting_steps.popleft()
                    step_by_child[_fork_step(steps[step_number], Path(folder, str(step_number)))] = step_number
                child_pid, wait_status = os.wait()
                if (failed_step := step_by_child.pop(child_pid, None)) is not None and wait_status:
                    raise StepFailed(_describe_failure(Path(folder, str(failed_step)), wait_status))
        finally:
            for child_pid in step_by_child:
                os.kill(child_pid, 9)
                os.waitpid(child_pid, 0)
        return [
            msgspec.json.decode(Path(folder, str(step_number)).read_bytes(), type=CountedStep)
            for step_number in range(len(steps))
        ]


def _fork_step(step: Callable[[], CountedStep], result_file: Path) -> int:
    """Fork a process that calls `step` and writes the result, or a sentence about its error, to the file `result_file`. Returns
    the process id."""
    if (pid := os.fork()) != 0:
        return pid
    exit_code = 1
    try:
        result_file.write_bytes(msgspec.json.encode(step()))
        exit_code = 0
    except BaseException as error:  # noqa: BLE001 - a forked process must not return into the code of its parent
        traceback.print_exception(error)
        result_file.write_text(summarize_error(error))
    finally:
        os._exit(exit_code)


def _describe_failure(result_file: Path, wait_status: int) -> str:
    if result_file.exists() and (error_text := result_file.read_text()):
        return error_text
    return f"the process of a step ended with {os.waitstatus_to_exitcode(wait_status)}."
