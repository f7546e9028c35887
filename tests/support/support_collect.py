"""Makes a realistic workspace of real records, for the tests of `collect` and for looking at its report.

Every time is computed and not random, so a test can compute the expected value of each metric.
"""

from __future__ import annotations

import gzip
import json
import math
import pwd
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from collect.loading.loaded_run import LoadedRun
from shardlab.files import files
from shardlab.hardware.host import Host, Nic
from shardlab.hardware.nvml import Gpu
from shardlab.matrix.cell import Cell, Optimizer
from shardlab.matrix.expansion import ExpandedCell, Expansion
from shardlab.runs.record import SCHEMA, Event, GpuSample, LineWriter, NicSample, Result, Sample, StepRecord
from shardlab.runs.run import Run, World, make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import JudgedState
from shardlab.workspace.workspace import Workspace

START_S = 1_760_000_000.0  # wall-clock time of the first step of every run, in seconds since the epoch
MIB = 2**20
TOKENS = 256  # units that each rank processes in a step, if the run has two ranks
HOST = "node0"


def cell(strategy: str = "single", gpus: int = 1, launcher: str = "torchrun", **other: Any) -> Cell:
    """A resolved cell: global batch 8, 10 timed steps after 2 of warm-up."""
    keys: dict[str, Any] = {
        "workload": "gpt2-tiny",
        "strategy": strategy,
        "gpus": gpus,
        "dp": gpus,
        "prove": "off",
        "launcher": launcher,
        "global_batch_size": 8,
        "micro_batch_size": 8 // gpus,
        "seq_len": 64,
        "steps": 10,
        "warmup_steps": 2,
        "optimizer": Optimizer(name="adamw", lr=3e-4),
        "time_limit_s": 600,
    }
    return Cell(**(keys | other))


def loss_at(step: int) -> float:
    return 2.0 + 5.0 * math.exp(-step / 6)


def step_ms(what: Cell, rank: int, step: int, repeat: int) -> float:
    """The duration of a step of a rank in ms, computed from a formula.

    ddp divides the work over the ranks with an overhead of 10 %, fsdp2 with 25 %. Rank 1 takes 2 ms longer than rank 0, and
    each repeat 1 ms longer than the repeat before it.
    """
    overhead = {"single": 1.0, "ddp": 1.1, "fsdp2": 1.25}.get(what.strategy, 1.0)
    return 100 * overhead / what.gpus + 2 * rank + repeat + 3 * math.sin(step * 1.7)


def run_file(what: Cell, repeat: int = 1, attempt: int = 1, rehearsal: bool = True) -> Run:
    """The content of run.json of a run of this cell."""
    return Run(
        schema=1,
        run_id=make_run_id(what, repeat, attempt),
        matrix="quickstart",
        cell=what,
        cell_hash=what.hash(),
        repeat=repeat,
        attempt=attempt,
        launcher=what.launcher,
        rehearsal=rehearsal,
        world=World(what.nnodes, what.gpus // what.nnodes, what.gpus),
        cluster={"name": "local", "provider": "local"},
        data_path="/data",
        versions={"torch": "2.13.0", "shardlab": "0.1.0"},
        git_commit="fb940fb5c0ffee00fb940fb5c0ffee00fb940fb5",
        templates={},
        created="2026-01-01T00:00:00Z",
    )


def prepare(workspace: Workspace, what: Cell, repeat: int = 1, attempt: int = 1, rehearsal: bool = True) -> RunDir:
    """Write a run that is rendered and not started: run.json and its first event."""
    folder = RunDir(workspace.runs / make_run_id(what, repeat, attempt))
    files.make_folder(folder.path)
    files.write_json(folder.run_json, run_file(what, repeat, attempt, rehearsal), sync=False)
    event(folder, "rendered", -5)
    return folder


def loaded(what: Cell, **records: Any) -> LoadedRun:
    """A LoadedRun of a cell with the given records, as metrics get it. It is made in memory and has no folder on the disk."""
    run = run_file(what)
    return LoadedRun(RunDir(Path(run.run_id)), JudgedState("completed", ""), run, **records)


def event(folder: RunDir, name: str, after_s: float, **data: Any) -> None:
    with LineWriter(folder.events_file("attempt")) as lines:
        lines.write_record(Event(schema=SCHEMA, event=name, writer="attempt", wall_s=START_S + after_s, host=HOST, data=data))


def train(folder: RunDir, steps: int | None = None, gpu: bool | dict[str, Any] = False, loss_shift: float = 0.0) -> float:
    """Write the step records and the telemetry of a run. Returns the end of the last step, in seconds after START_S.

    Warm-up steps take ten times as long as timed steps.
    """
    run = folder.read_run()
    what = run.cell
    asked = (what.steps or 0) if steps is None else steps
    ended = 0.0
    for rank in range(what.gpus):
        with LineWriter(folder.steps_file(rank)) as lines:
            now = 0.0
            for index in range(what.warmup_steps + asked):
                warmup = index < what.warmup_steps
                step = index + 1 if warmup else index + 1 - what.warmup_steps
                ms = step_ms(what, rank, step, run.repeat) * (10 if warmup else 1)
                now += max(step_ms(what, r, step, run.repeat) for r in range(what.gpus)) * (10 if warmup else 1) / 1000
                record = StepRecord(
                    schema=SCHEMA,
                    step=step,
                    t_s=now,
                    wall_s=START_S + now,
                    loss=loss_at(index) + loss_shift + (0.01 if rank == 0 else -0.01) * (what.gpus > 1),
                    units=2 * TOKENS // what.gpus,
                    step_ms=ms,
                    rss_bytes=(300 + 10 * rank) * MIB,
                    warmup=warmup,
                )
                if gpu:
                    record.allocated_bytes = (8000 // what.gpus + 100 * rank) * MIB
                lines.write_record(record)
            ended = now
    sample(folder, ended, gpu=gpu)
    return ended


def sample(folder: RunDir, ended: float, gpu: bool | dict[str, Any] = False, hz: float = 20) -> None:
    """Write telemetry from 1 s before the first step to 1 s after the last: 50 % CPU, 1 MiB/s on eth0, 8 MiB/s on lo.

    ended: the end of the last step, in seconds after START_S. hz: samples per second.
    gpu: True for a GPU; a dictionary for a GPU with these further fields of GpuSample. The key "every" is a number n: only
    every n-th sample has the further fields.
    """
    more = dict(gpu) if isinstance(gpu, dict) else {}
    every = more.pop("every", 1)
    with LineWriter(folder.samples_file(HOST)) as lines:
        for tick in range(int((ended + 2) * hz)):
            t = tick / hz - 1
            also = {} if tick % every else more
            lines.write_record(
                Sample(
                    schema=SCHEMA,
                    t_s=t + 1,
                    wall_s=START_S + t,
                    host=HOST,
                    boot_id="boot",
                    cpu_pct=None if tick == 0 else 50 + 10 * math.sin(tick / 3) * (0 < t < ended),
                    memory_used_bytes=int((4 + min(t, 1)) * 1024) * MIB,
                    memory_total_bytes=16 * 1024 * MIB,
                    gpus=[GpuSample(uuid="GPU-0", utilization_pct=80.0 + tick % 3, **also)] if gpu else None,
                    nics=[
                        NicSample(name="eth0", kind="virtual", tx_bytes=5000 + int((t + 1) * MIB), rx_bytes=0),
                        NicSample(name="lo", kind="loopback", tx_bytes=int((t + 1) * 8 * MIB), rx_bytes=0),
                    ],
                )
            )


def finish(folder: RunDir, ended: float, **found: Any) -> None:
    """Write the result and the last event of a run that ended with exit code 0. found: replaces fields of the result."""
    result = Result(
        schema=1,
        run_id=folder.run_id,
        state="completed",
        rehearsal=folder.read_run().rehearsal,
        steps=folder.read_run().cell.steps or 0,
        unit="tokens",
        data={"name": "synthetic-tokens", "sha256": "ab" * 32, "synthetic": True},
        versions={"torch": "2.13.0"},
    )
    result = msgspec.structs.replace(result, **found)
    files.write_json(folder.result, result, sync=False)
    event(folder, "exited", ended + 1, code=0)


def environment(folder: RunDir, gpus: list[Gpu] | None = None) -> None:
    host = Host(
        schema=1,
        host=HOST,
        boot_id="boot",
        kernel="6.1.0",
        system="Debian GNU/Linux 12",
        cpu_model="AMD EPYC 7B13",
        cpus=2,
        cpus_allowed=2,
        memory_bytes=16 * 1024 * MIB,
        gpus=gpus,
        gpu_why_absent="NVML: Driver Not Loaded",
        nics=[Nic("lo", "loopback"), Nic("eth0", "virtual", speed_mbps=10_000)],
        python="3.11.2",
        packages={"torch": "2.13.0", "shardlab": "0.1.0"},
    )
    path = folder.environment_file(HOST)
    files.make_folder(path.parent)
    files.write_json(path, host, sync=False)


def completed(
    workspace: Workspace,
    what: Cell,
    repeat: int = 1,
    attempt: int = 1,
    *,
    rehearsal: bool = True,
    gpus: list[Gpu] | None = None,
    found: dict[str, Any] | None = None,
    **options: Any,
) -> RunDir:
    """Write a run that completed.

    gpus: the GPUs of the run's host. found: fields of the run's result. options: further arguments of `train`.
    """
    folder = prepare(workspace, what, repeat, attempt, rehearsal)
    event(folder, "started", -2)
    environment(folder, gpus)
    finish(folder, train(folder, **options), **(found or {}))
    return folder


def save_snapshot(run: RunDir, sections: dict[str, Any]) -> None:
    """Write the snapshot that the CUDA allocator of rank 0 has after step 2."""
    run.snapshot_file(0).parent.mkdir(exist_ok=True)
    run.snapshot_file(0).write_bytes(gzip.compress(json.dumps({"schema": 1, "rank": 0, "step": 2, **sections}).encode()))


def failed(workspace: Workspace, what: Cell, repeat: int, said: str, steps: int = 0, attempt: int = 1, **ended: Any) -> RunDir:
    folder = prepare(workspace, what, repeat, attempt)
    event(folder, "started", -2)
    environment(folder)
    train(folder, steps=steps)
    event(folder, "oom" if said.startswith("CUDA") else "failed", 8, why=said)
    event(folder, "exited", 9, **(ended or {"code": 1}))
    return folder


def keep(
    workspace: Workspace, cells: list[Cell], repeats: int = 3, title: str = "Strategies on two ranks", **study: Any
) -> None:
    """Write the expansion of a matrix with these cells into the workspace.

    study: further fields of the expansion, such as claims, reported numbers, settings, assumptions, notes and excluded cells.
    """
    plain = {
        "schema": 1,
        "name": "quickstart",
        "title": title,
        "path": str(Path("matrices/quickstart.yaml").absolute()),
        "cells": [],
        "excluded": [],
    }
    kept = msgspec.convert(plain | study, Expansion)
    kept.cells = [
        ExpandedCell(what.name(), what, [make_run_id(what, repeat) for repeat in range(1, repeats + 1)]) for what in cells
    ]
    workspace.store_expansion(kept)


def matrix(path: Path, title: str = "Strategies on two ranks") -> Workspace:
    """Make a workspace with runs in many states.

    Completed: single on 1 rank, ddp on 2 ranks with two launchers, fsdp2 on 2 ranks. Other runs failed, ran out of memory or
    reached their time limit, and the cell zero3 was never run. A telemetry file is cut in its last line, and another file has
    damaged lines.
    """
    workspace = Workspace(path)
    single, ddp, forked = cell(), cell("ddp", 2), cell("ddp", 2, "fork")
    fsdp2, big, never = cell("fsdp2", 2), cell("fsdp2", 2, global_batch_size=64, micro_batch_size=32), cell("zero3", 2)
    keep(workspace, [single, ddp, forked, fsdp2, big, never], title=title)
    for repeat in (1, 2, 3):
        completed(workspace, single, repeat)
        completed(workspace, ddp, repeat)
        completed(workspace, forked, repeat, loss_shift=1e-6)
    completed(workspace, fsdp2, 1)
    failed(workspace, fsdp2, 2, "RuntimeError: rank 1 left", steps=4)
    completed(workspace, fsdp2, 2, attempt=2)
    failed(workspace, fsdp2, 3, "rank 0: ValueError: shapes <1> & 'two'", steps=2)
    failed(workspace, big, 1, "CUDA out of memory: tried to allocate 2.00 GiB", steps=1)
    failed(workspace, big, 2, "stopped", steps=3, reason="timeout", why="ended at its time limit of 600 s")
    with workspace.find_run_dir(make_run_id(fsdp2, 1)).samples_file(HOST).open("ab") as handle:
        handle.write(b'{"schema":1,"t_s":9')
    with workspace.find_run_dir(make_run_id(single, 2)).samples_file(HOST).open("ab") as handle:
        handle.write(b"not a record\n{}\n")
    return workspace


def complete_pipelines(workspace: Workspace, micro_batches: Sequence[int] = (4, 16)) -> None:
    """Make a workspace with completed runs of a pipeline on two ranks, one run for each number of micro-batches.

    On the first rank, forward takes 40 ms and backward 60 ms. On the last rank, forward takes 60 ms and backward 40 ms.
    """
    cells = [
        cell("pp-gpipe", 2, pp=2, dp=1, gradient_accumulation_steps=count, micro_batch_size=1, global_batch_size=count)
        for count in micro_batches
    ]
    keep(workspace, [cell(), *cells], 1)
    completed(workspace, cell())
    for pipeline in cells:
        folder = completed(workspace, pipeline)
        for rank in (0, 1):
            path = folder.steps_file(rank)
            records = [json.loads(line) for line in path.read_text().splitlines()]
            passes = {"forward_ms": 40.0 if rank == 0 else 60.0, "backward_ms": 60.0 if rank == 0 else 40.0}
            path.write_text("".join(json.dumps(record | passes) + "\n" for record in records))


def earlier(path: Path) -> Workspace:
    """Make a workspace with runs that an earlier version wrote, and with its report of them (golden/earlier-workspace.zip).

    The file is an anonymous archive that was opened: seven runs of `earlier-study`, one with a trace, one out of memory.
    """
    with zipfile.ZipFile(Path(__file__).parents[1] / "golden" / "earlier-workspace.zip") as archive:
        archive.extractall(path)
    return Workspace(path)


def ten_digits(value: Any) -> Any:
    """Round every number of a document to ten digits, because the last digits differ between processors."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {key: ten_digits(one) for key, one in value.items()}
    return [ten_digits(one) for one in value] if isinstance(value, list | tuple) else value


def log_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make `name` the user who runs the command: in the variables of the environment, and as the name of each user id."""
    for variable in ("USER", "LOGNAME", "SUDO_USER"):
        monkeypatch.setenv(variable, name)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=name))
