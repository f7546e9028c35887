"""What is true of each run: its own records and the scheduler's word, held together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from jobs.schedulers import local
from shardlab.errors import ShardlabError
from shardlab.record import StepRecord
from shardlab.run import Run, attempt_of
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace


class Status(msgspec.Struct, kw_only=True):
    """One run as `jobs status` shows it. throughput: units per second over the timed steps so far, from rank 0."""

    id: str
    cell: dict[str, Any] | None
    state: str
    why: str
    scheduler: dict[str, str]
    step: int | None
    steps: int | None
    throughput: float | None
    unit: str | None
    eta_s: float | None
    hosts: list[str]
    attempt: int | None
    repeat: int | None
    rehearsal: bool | None
    resumed_from_step: int | None = None  # timed steps that a checkpoint brought along
    expected: bool  # completed, or an end that the cell says is proper


def status(workspace: Workspace, folder: RunDir) -> Status:
    """The status of one run; a folder that cannot be read is `unknown`, with the reason."""
    try:
        run = folder.read_run()
        verdict, raw = local.observe(workspace, folder, folder.judge())
    except ShardlabError as error:
        return _unreadable(folder, error)
    rank0 = [record for record in folder.steps(0).records if not record.warmup] if verdict.state != "planned" else []
    rate, eta_s = _progress(run, rank0)
    resumed = next((e.data.get("step") for e in reversed(folder.events()) if e.event == "resumed"), None)
    result = folder.read_result() if verdict.state == "completed" else None
    return Status(
        id=run.run_id,
        cell=msgspec.to_builtins(run.cell),
        state=verdict.state,
        why=verdict.why,
        scheduler={"name": local.NAME, "id": run.run_id, "raw": raw},
        step=rank0[-1].step if rank0 else None,
        steps=result.steps if result else run.cell.steps,
        throughput=result.throughput_per_s if result else rate,
        unit=result.unit if result else None,
        eta_s=eta_s if verdict.state == "running" else None,
        hosts=sorted({event.host for event in folder.events() if event.writer == "attempt"}),
        attempt=run.attempt,
        repeat=run.repeat,
        rehearsal=run.rehearsal,
        resumed_from_step=resumed,
        expected=verdict.state == "completed" or verdict.state in run.cell.expect,
    )


def latest(folders: Iterable[RunDir]) -> list[RunDir]:
    """Of several attempts at one repeat only the last, in the order in which the first ones came."""
    last: dict[str, RunDir] = {}
    for folder in folders:
        first, attempt = attempt_of(folder.run_id)
        if first not in last or attempt > attempt_of(last[first].run_id)[1]:
            last[first] = folder
    return list(last.values())


def _progress(run: Run, records: list[StepRecord]) -> tuple[float | None, float | None]:
    """(units per second over all ranks, seconds to go), from one rank's timed steps; None before the first."""
    busy_s = sum(record.step_ms for record in records) / 1000
    if not busy_s:
        return None, None
    rate = sum(record.units for record in records) * run.cell.dp / busy_s
    left = run.cell.steps - len(records) if run.cell.steps is not None else None
    return rate, left * busy_s / len(records) if left is not None else None


def _unreadable(folder: RunDir, error: ShardlabError) -> Status:
    return Status(
        id=folder.run_id,
        cell=None,
        state="unknown",
        why=str(error),
        scheduler={"name": "-", "id": "-", "raw": "-"},
        step=None,
        steps=None,
        throughput=None,
        unit=None,
        eta_s=None,
        hosts=[],
        attempt=None,
        repeat=None,
        rehearsal=None,
        expected=False,
    )
