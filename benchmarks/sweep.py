"""Measures `jobs render`, `jobs submit` and `jobs status` for a sweep of 10,000 runs on a cluster with Slurm.

    python benchmarks/sweep.py [--runs 10000] [--sent 1000] [--rounds 3] [--profile]

The times include the start of Python. Slurm's commands are stand-ins, which record each call and answer at once as if some runs
were running and the others had completed. So only our own time is measured, and how often our commands call Slurm. The line
`all files` is a lower bound for rendering: the time to write the same bytes into the same number of files. --profile: run
`jobs render` and `jobs status` once more with a profiler.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from summarize import ProcessCost, cost

from jobs.slurm import submission
from shardlab.files import files
from shardlab.hardware import host
from shardlab.record_types import Spread
from shardlab.runs.record import SCHEMA, Event, Record, Result, StepRecord
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

MAX_ARRAY_SIZE = 1001  # Slurm's default
STRATEGIES, GPUS, RATES = ("ddp", "fsdp2", "fsdp2-zero2", "zero2", "zero3"), (2, 4), 20
A_SEED = len(STRATEGIES) * len(GPUS) * RATES  # number of runs for each seed
STEPS = 10
AT_WORK = 20  # number of runs that are running, when all other runs have completed
CLUSTER = """\
schema: 1
name: bench
provider: virtual
nodes:
  - {name: head, roles: [controller]}
  - {name: work1}
gpus: {type: h100, per_node: 8}
slurm: {partition: gpu}
"""
STAND_INS = {
    "sbatch": 'echo "$*" >>"$0.log"; wc -l <"$0.log"',
    "scontrol": f'echo "$*" >>"$0.log"; echo "ClusterName = bench"; echo "MaxArraySize = {MAX_ARRAY_SIZE}"',
    "sacct": 'echo "$*" >>"$0.log"; cat "$0.answer"',
    "squeue": 'echo "$*" >>"$0.log"; cat "$0.answer"',
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--runs", 10_000), ("--sent", 1000), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        slurm = StandIns(Path(temporary) / "slurm")
        workspace = Workspace(Path(temporary) / "workspace")
        matrix, out = _matrix(workspace, given.runs), Path(temporary) / "out"
        # Each round writes to a new folder, because ext4 needs many seconds to create files where it has just deleted many
        # files.
        renders = [[*_jobs("render", workspace), "--matrix", matrix, "--out", f"{out}-{n}"] for n in range(given.rounds + 1)]
        submit = [*_jobs("submit", workspace), "--matrix", matrix]
        few = ["--where", f"seed < {-(-given.sent // A_SEED)}"]
        status = _jobs("status", workspace)
        print(f"{given.runs} runs, median of {given.rounds} rounds on {os.cpu_count()} processors")
        _show(f"jobs render of {given.runs}", [cost(command) for command in renders[1:]], slurm)
        _show("  all files", _least(Path(f"{out}-1"), given.rounds), slurm)
        _show(f"jobs submit of {given.sent}", [cost([*submit, *few])], slurm)
        _show("jobs submit of the rest", [cost(submit)], slurm)
        fill(workspace, slurm)
        _show("jobs status", [cost(status) for _ in range(given.rounds)], slurm)
        _show("jobs status --json", [cost([*status, "--json"]) for _ in range(given.rounds)], slurm)
        if given.profile:
            for command in (renders[0], status):
                subprocess.run([sys.executable, "-m", "cProfile", "-s", "tottime", *command[1:]], check=True)


class StandIns:
    """Fake commands of Slurm. A new object puts their folder first on PATH of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name, script in STAND_INS.items():
            files.write_atomic(folder / name, f"#!/bin/sh\n{script}\n".encode(), mode=0o755)
            self.answer(name, [])
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"

    def answer(self, name: str, lines: Iterable[str]) -> None:
        (self.folder / f"{name}.answer").write_text("".join(f"{line}\n" for line in lines))

    def calls(self) -> dict[str, int]:
        """How often each command was called since the last call of this method; commands without a call are left out."""
        found = {}
        for name in STAND_INS:
            log = self.folder / f"{name}.log"
            lines = log.read_text().splitlines() if log.exists() else []
            seen = self.folder / f"{name}.seen"
            found[name] = len(lines) - (int(seen.read_text()) if seen.exists() else 0)
            seen.write_text(str(len(lines)))
        return {name: count for name, count in found.items() if count}


def _jobs(verb: str, workspace: Workspace) -> list[str]:
    return [sys.executable, "-m", "jobs", verb, "--workspace", str(workspace.path)]


def _matrix(workspace: Workspace, runs: int) -> str:
    """Write the cluster file and the matrix file of a sweep over strategies, GPUs, learning rates and seeds.

    runs: the number of cells. Returns the path of the matrix file.
    """
    files.make_folder(workspace.path)
    (workspace.path / "cluster.yaml").write_text(CLUSTER)
    rates = ", ".join(f"{{name: adamw, lr: {0.001 * 0.9**number:.3e}}}" for number in range(RATES))
    path = workspace.path / "sweep.yaml"
    path.write_text(
        "schema: 1\nname: sweep\n"
        f"defaults: {{workload: gpt2-tiny, global_batch_size: 64, seq_len: 64, steps: {STEPS}}}\n"
        f"axes:\n  strategy: [{', '.join(STRATEGIES)}]\n  gpus: {list(GPUS)}\n  optimizer: [{rates}]\n"
        f"  seed: {list(range(-(-runs // A_SEED)))}\n"
    )
    return str(path)


def _least(out: Path, rounds: int) -> list[ProcessCost]:
    """The cost of writing the same files as in `out` again, from memory to a new folder, in each round."""
    whole = {path.relative_to(out): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    folders = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_dir())
    found = []
    for _ in range(rounds):
        again = tempfile.mkdtemp(dir=out.parent)
        began, used = time.perf_counter(), time.process_time()
        for folder in folders:
            Path(again, folder).mkdir()
        for path, content in whole.items():
            files.write_new(Path(again, path), content)
        found.append(ProcessCost(time.perf_counter() - began, time.process_time() - used, 0))
    return found


def _show(what: str, found: list[ProcessCost], slurm: StandIns) -> None:
    seconds, cpu_s = (statistics.median(values) for values in list(zip(*found, strict=True))[:2])
    each = {name: count / len(found) for name, count in slurm.calls().items()}
    called = ", ".join(f"{name} {count:g}" for name, count in each.items())
    calls = f"  calls: {called}" if called else ""
    print(f"{what:26} {seconds:6.2f} s {cpu_s:6.2f} CPU s  load {os.getloadavg()[0]:4.1f}{calls}", flush=True)


def fill(workspace: Workspace, slurm: StandIns) -> None:
    """Write the records of the submitted runs, and the answers of Slurm about them: the last AT_WORK runs are running, and the
    others have completed."""
    machine = msgspec.json.encode(host.read_host())
    sent = [(one, place, run) for one in submission.list_submissions(workspace) for place, run in enumerate(one.runs)]
    queue, accounts = [], []
    for number, (one, place, run) in enumerate(sent):
        at_work = number >= len(sent) - AT_WORK
        _records(RunDir(workspace.runs / run), machine, ended=not at_work)
        job, word = one.find_job_id(place), "RUNNING" if at_work else "COMPLETED"
        accounts.append(f"{job}|{one.token}|{word}|1760000000|1760000010|work1|None")
        queue += accounts[-1:] if at_work else []
    slurm.answer("sacct", accounts)
    slurm.answer("squeue", queue)


def _records(folder: RunDir, machine: bytes, *, ended: bool) -> None:
    """Write the records of a run with two or four ranks. ended: whether the run has completed; else half of its steps are done.

    machine: the content of the file that describes the host.
    """
    run = folder.read_run()
    begun = time.time()
    for inside in ("claim", "env", "steps", "samples"):
        (folder.path / inside).mkdir()
    folder.environment_file("work1").write_bytes(machine)
    events = [_event("started", begun, pid=1, created=begun, boot_id="b", job="1", restarts=0)]
    steps = STEPS if ended else STEPS // 2
    for rank in range(run.cell.gpus):
        folder.steps_file(rank).write_bytes(_lines(_step(number, begun) for number in range(1, steps + 1)))
    if ended:
        folder.result.write_bytes(msgspec.json.encode(_result(run)))
        events.append(_event("exited", begun + 2, code=0, reason=None, why="", steps=STEPS))
    folder.events_file("attempt").write_bytes(_lines(events))


def _lines(records: Iterable[Record]) -> bytes:
    return msgspec.json.Encoder().encode_lines(list(records))


def _event(name: str, at_s: float, **data: object) -> Event:
    return Event(schema=SCHEMA, event=name, writer="attempt", wall_s=at_s, host="work1", data=data)


def _step(number: int, begun: float) -> StepRecord:
    return StepRecord(
        schema=SCHEMA, step=number, t_s=1000 + number / 10, wall_s=begun + number / 10, units=2048, step_ms=98.5, loss=2.5,
        data_ms=1.5, forward_ms=30.5, backward_ms=60.5, optimizer_ms=6, rss_bytes=400 * 2**20,
    )  # fmt: skip


def _result(run: Run) -> Result:
    return Result(
        schema=1, run_id=run.run_id, state="completed", rehearsal=False, steps=STEPS, unit="tokens", final_loss=2.5,
        throughput_per_s=5000, step_time_ms=Spread(98.5, 98.5, 98.5, 98.5, STEPS), train_time_s=1,
        peak_memory_bytes={"rss": 400 * 2**20}, data={"name": "synthetic tokens", "sha256": "ab" * 32, "synthetic": True},
        knobs={"asked": dict(run.cell.options), "effective": {"backend": "gloo"}}, versions=run.versions,
    )  # fmt: skip


if __name__ == "__main__":
    main()
