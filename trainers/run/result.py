"""Writes the result of a run (result.json) from the results of all ranks, after all ranks have finished their last step."""

from __future__ import annotations

import math
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from shardlab.files import files
from shardlab.hardware import host
from shardlab.record_types import Spread
from shardlab.runs.record import SCHEMA, Result, SameWork
from shardlab.runs.run import Run, is_rehearsal
from shardlab.runs.rundir import RunDir
from trainers import menu

if TYPE_CHECKING:
    from trainers.engine import Accountable
    from trainers.ranks.ranks import Peers, Ranks
    from trainers.task import Task


class RankResult(msgspec.Struct, frozen=True):
    """The results of one rank."""

    train_time_s: float
    """Wall-clock seconds of its timed steps."""
    loss: float
    """At the last step; NaN if the rank had no data in this step."""
    peak_bytes: dict[str, int]
    """Peak memory by kind (`allocated`, `reserved`, `rss`)."""
    step_ms: list[float]
    """Milliseconds of each timed step."""
    watched_flags: list[bool]
    """For each timed step, whether an instrument slowed it down."""
    items_by_step: list[int]
    """Items of all ranks together in each timed step."""
    from_first_step: bool
    """Whether step_ms begins with the run's first timed step, even if the run resumed from a checkpoint."""


def write_result(
    run: Run,
    run_dir: RunDir,
    ranks: Ranks,
    peers: Peers,
    result: RankResult,
    engine: Accountable,
    task: Task,
    steps_per_epoch: int,
    same_work: SameWork,
    instruments: dict[str, dict[str, Any]],
    *,
    resumed_from_step: int | None,
) -> None:
    """Gather the results of the ranks in `peers`; rank 0 writes the file. A collective: it returns when the file is written.
    All values are from the ranks that trained to the end.

    peers: the ranks that train. result: the results of this rank. same_work: the verdict of the proof. instruments: the
    results of the instruments by name. resumed_from_step: the step of the checkpoint from which the run resumed; None if it did
    not resume.
    """
    kinds = sorted(result.peak_bytes)
    peak_sizes = [result.peak_bytes[kind] for kind in kinds]
    numbers_by_rank = peers.all_gather_numbers([result.train_time_s, result.loss, *peak_sizes, *result.step_ms])
    gpu_numbers = peers.all_gather_numbers(_read_gpu_numbers(ranks.device))
    knobs = _collect_knobs(run, engine)
    parameter_count = engine.count_parameters() - task.padding
    sent_bytes = same_work.communication_bytes or _sum_theory_bytes(run, peers, engine, ranks.backend)
    peers.barrier()
    if ranks.rank == 0:
        timing = _Timing.from_numbers(run, result, numbers_by_rank, len(kinds), task.units_per_item)
        # Steps before the checkpoint of another cell's run have no records here; all times are those of this run's own steps.
        earlier_steps = (resumed_from_step or 0) if not result.from_first_step else 0
        in_epochs = run.training_cell.epochs is not None and not earlier_steps
        files.write_json(run_dir.result, Result(
            schema=SCHEMA,
            run_id=run.run_id,
            state=_judge_state(run, len(numbers_by_rank)),
            rehearsal=is_rehearsal(run.training_cell, run.cluster, on_cpu=bool(np.isnan(gpu_numbers).any())),
            steps=earlier_steps + len(timing.steps_ms),
            unit=menu.find_workload_of_cell(run.training_cell).unit,
            resumed_from_step=resumed_from_step,
            final_loss=float(np.nanmean(numbers_by_rank[:, 1])),
            final_accuracy=instruments.get("validation", {}).get("accuracy"),
            throughput_per_s=timing.throughput_per_s,
            step_time_ms=timing.spread_ms,
            train_time_s=timing.train_time_s,
            epoch_time_s=_sum_epoch_seconds(timing.steps_ms, steps_per_epoch) if in_epochs else None,
            peak_memory_bytes=_find_peak_memory(kinds, numbers_by_rank, instruments),
            parameters=parameter_count,
            flops_per_unit=task.flops_per_unit(),
            same_work=same_work,
            communication_bytes=sent_bytes,
            data=msgspec.to_builtins(task.source),
            instruments=instruments,
            knobs=knobs,
            versions=host.read_package_versions(),
            gpus=_format_gpu_names(gpu_numbers),
        ))  # fmt: skip
    peers.barrier()


def _collect_knobs(run: Run, engine: Accountable) -> dict[str, Any]:
    """The settings that the cell asks for and those in effect. Every rank calls it, because it may be a collective."""
    effective = {"sync": menu.find_strategy_of_cell(run.training_cell).sync(run.training_cell), **engine.effective()}
    return {"asked": _list_requested_settings(run), "effective": effective}


def _judge_state(run: Run, finished_ranks: int) -> str:
    """The state of the result. If a rank was lost, it is `failed`, unless the cell asked for the loss of one rank."""
    expected_ranks = run.training_cell.gpus - (run.training_cell.instruments.lost_worker is not None)
    return "completed" if finished_ranks >= expected_ranks else "failed"


class _Timing(msgspec.Struct, frozen=True):
    """The times of the timed steps. The time of a step is that of its slowest rank.

    The sum of these times is slightly larger than the wall-clock time, because a different rank may be the slowest in each
    step. It is never smaller than the sum of the step times of any rank.
    """

    train_time_s: float
    """The wall-clock time of the slowest rank, from the start of the first timed step to the end of the last timed step. It
    includes the time between steps, but not the time of instruments between steps."""
    steps_ms: np.ndarray
    spread_ms: Spread | None
    """Statistics of the times of the steps that no instrument slowed down; None if there is no such step."""
    throughput_per_s: float | None
    """The units of data in the steps that no instrument slowed down, on all ranks that trained to the end, divided by the
    seconds of these steps."""

    @classmethod
    def from_numbers(cls, run: Run, rank_result: RankResult, rows: np.ndarray, kind_count: int, units_per_item: int) -> _Timing:
        """Compute the times. rows: the gathered numbers, with a row for each rank: its time, its loss, its peak memory by
        kind, and the time of each step; the shape is (ranks, 2 + kinds + steps)."""
        train_time_s, steps_ms = float(rows[:, 0].max()), rows[:, 2 + kind_count :].max(axis=0)
        is_counted = ~np.array(rank_result.watched_flags, dtype=bool)
        if not is_counted.any():
            return cls(train_time_s, steps_ms, None, None)
        finished_share = len(rows) / run.training_cell.gpus  # ranks have equal shares of every batch
        unit_count = int(np.array(rank_result.items_by_step)[is_counted].sum()) * units_per_item * finished_share
        throughput_per_s = unit_count / (float(steps_ms[is_counted].sum()) / 1000)
        return cls(train_time_s, steps_ms, _compute_spread(steps_ms[is_counted]), throughput_per_s)


def _sum_theory_bytes(run: Run, peers: Peers, engine: Accountable, backend: str) -> dict[str, float] | None:
    """The bytes that all ranks send in a step by theory: `theory`, `wire` and, if textbooks give a number, `textbook`.

    With parameter servers, they are `theory`, `counted` and `textbook`. None if a rank was lost. A collective.
    """
    terms = engine.theory()
    rows = peers.all_gather_numbers([sum(term.sent_bytes for term in terms), sum(term.wire_bytes(backend) for term in terms)])
    textbook_bytes = engine.compute_textbook_bytes()
    server_bytes = engine.count_total_sent_bytes()
    if len(rows) < run.training_cell.gpus:
        return None
    theory_bytes, wire_bytes = map(float, rows.sum(axis=0))
    bytes_by_kind = server_bytes or {"theory": theory_bytes, "wire": wire_bytes}
    return {**bytes_by_kind, **({"textbook": textbook_bytes * run.training_cell.gpus} if textbook_bytes is not None else {})}


def _list_requested_settings(run: Run) -> dict[str, Any]:
    """The options, precision and optimizer that the cell asked for."""
    cell = run.training_cell
    return {
        **cell.options,
        "precision": cell.precision,
        "micro_batch_size": cell.micro_batch_size,
        "gradient_accumulation_steps": cell.gradient_accumulation_steps,
        "optimizer": msgspec.to_builtins(cell.optimizer),
        "schedule": msgspec.to_builtins(cell.schedule),
    }


def _find_peak_memory(kinds: list[str], numbers_by_rank: np.ndarray, instruments: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Peak bytes of memory by kind, of the rank with the highest peak.

    If the instrument `memory` recorded a step, also the bytes by category (parameters, gradients, ...) at the peak of this
    step. numbers_by_rank: as for `_Timing.from_numbers`.
    """
    peak_sizes = numbers_by_rank[:, 2 : 2 + len(kinds)].max(axis=0)
    bytes_by_category: dict[str, int] = instruments.get("memory", {}).get("peak_bytes", {})
    return {kind: int(size) for kind, size in zip(kinds, peak_sizes)} | bytes_by_category


def _compute_spread(steps_ms: np.ndarray) -> Spread:
    p5, median, p95 = (float(value) for value in np.percentile(steps_ms, (5, 50, 95)))
    return Spread(median=median, mean=float(steps_ms.mean()), p5=p5, p95=p95, n=len(steps_ms))


def _sum_epoch_seconds(steps_ms: np.ndarray, steps_per_epoch: int) -> list[float]:
    """The duration of each epoch in seconds, which is the sum of the times of its steps."""
    return [float(epoch.sum()) / 1000 for epoch in steps_ms.reshape(-1, steps_per_epoch)]


def _read_gpu_numbers(device: torch.device) -> list[float]:
    """The UUID of this GPU in 4 numbers of 32 bits, which float64 holds exactly; NaN for a CPU."""
    if device.type != "cuda":
        return [math.nan] * 4
    uuid_bytes = uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes
    return [float(int.from_bytes(uuid_bytes[start : start + 4])) for start in range(0, 16, 4)]


def _format_gpu_names(numbers_by_rank: np.ndarray) -> list[str]:
    """The UUIDs of GPUs as NVML writes them (GPU-...), without duplicates. numbers_by_rank: of `_read_gpu_numbers`."""
    uuid_texts: dict[str, None] = {}
    for rank_numbers in numbers_by_rank:
        if not any(map(math.isnan, rank_numbers)):
            uuid_texts[f"GPU-{uuid.UUID(bytes=b''.join(int(number).to_bytes(4) for number in rank_numbers))}"] = None
    return list(uuid_texts)
