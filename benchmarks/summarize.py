"""Measures the time and the peak memory of `collect summarize` for many runs, and of a program that only reads the same files.

    python benchmarks/summarize.py [--runs 10000] [--repeats 3] [--steps 50] [--rounds 3] [--profile]

Writes a workspace of completed runs as rehearsals leave them: one to four ranks, step records, telemetry at 2 Hz, events,
result, environment, script and logs. Only the page cache of the operating system is kept between rounds. The program that only
reads is a loop in one process that reads every byte and decodes every record into its type. --profile: run `collect summarize`
once more with a profiler.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import psutil
from small_cell import cell

from shardlab.files import files
from shardlab.hardware import host
from shardlab.matrix.cell import Cell, Optimizer
from shardlab.record_types import Spread
from shardlab.runs.record import SCHEMA, Event, LineWriter, NicSample, Record, Result, SameWork, Sample, StepRecord
from shardlab.runs.run import Run, World, make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Expansion, Workspace

MIB = 2**20
START_S = 1_760_000_000.0  # seconds since the epoch
STRATEGIES = (("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2-zero2", 2))
SUMMARIZE = [sys.executable, "-m", "collect", "summarize", "--workspace"]
PROFILE = [sys.executable, "-m", "cProfile", "-s", "tottime", "-m", "collect", "summarize", "--workspace"]
READ = """
import sys
from pathlib import Path
import msgspec
from shardlab.hardware.host import Host
from shardlab.runs.record import Event, Result, Sample, StepRecord
from shardlab.runs.run import Run
lines = {kind: msgspec.json.Decoder(of) for kind, of in (("rank", StepRecord), ("node", Sample), ("events", Event))}
whole = {kind: msgspec.json.Decoder(of) for kind, of in (("run", Run), ("result", Result), ("node", Host))}
for path in Path(sys.argv[1], "runs").glob("**/*"):
    if path.is_file():
        raw, kind = path.read_bytes(), path.name.replace("-", ".").split(".")[0]
        if path.suffix == ".jsonl":
            lines[kind].decode_lines(raw)
        elif path.suffix == ".json":
            whole[kind].decode(raw)
"""


def cells(count: int, steps: int) -> list[Cell]:
    """The cells of a sweep over learning rates and strategies, with one to four ranks. count: the number of cells."""
    found = []
    for index in range(count):
        strategy, gpus = STRATEGIES[index % len(STRATEGIES)]
        rate = 1e-3 * 0.999 ** (index // len(STRATEGIES))
        keys = {"strategy": strategy, "gpus": gpus, "dp": gpus, "micro_batch_size": 8 // gpus, "launcher": "fork"}
        found.append(cell("gpt2-tiny", 64, steps=steps, warmup_steps=5, seq_len=64, optimizer=Optimizer("adamw", rate), **keys))
    return found


def write(workspace: Workspace, what: Cell, repeat: int, machine: host.Host) -> str:
    """Write the files of a completed run. Returns the id of the run."""
    folder = RunDir(workspace.runs / make_run_id(what, repeat))
    for inside in ("env", "log"):
        files.make_folder(folder.path / inside)
    seconds = _steps(folder, what, repeat)
    run = Run(
        schema=1, run_id=folder.run_id, matrix="sweep", cell=what, cell_hash=what.hash(), repeat=repeat, attempt=1,
        launcher="fork", rehearsal=True, world=World(1, what.gpus, what.gpus), cluster={"name": "local", "provider": "local"},
        data_path="/data", versions=machine.packages, git_commit=None, templates={}, created="2026-01-01T00:00:00Z",
    )  # fmt: skip
    result = Result(
        schema=1, run_id=folder.run_id, state="completed", rehearsal=True, steps=what.steps or 0, unit="tokens",
        final_loss=2.5, throughput_per_s=5000.0, step_time_ms=Spread(50, 50, 45, 55, what.steps or 0), train_time_s=seconds,
        peak_memory_bytes={"rss": 400 * MIB}, parameters=331_626, flops_per_unit=2e7,
        same_work=SameWork(verdict="proven", why="against one process, 3 steps with SGD, fp32", loss_difference=4e-8),
        communication_bytes={"theory": 2e6, "counted": 2e6, "textbook": 4e6},
        data={"name": "synthetic tokens", "sha256": "ab" * 32, "synthetic": True},
        knobs={"asked": dict(what.options), "effective": {"backend": "gloo"}}, versions=machine.packages,
    )  # fmt: skip
    files.write_json(folder.run_json, run, sync=False)
    files.write_json(folder.result, result, sync=False)
    files.write_json(folder.environment_file("node"), machine, sync=False)
    (folder.path / "job.sh").write_text("#!/bin/bash\n" + "# as rendered\n" * 80)
    for name in ("job", "sampler", "script", *(f"rank-{rank:05d}" for rank in range(what.gpus))):
        (folder.log / f"{name}.log").touch()
    _lines(folder.events_file("controller"), [_event("rendered", -5), _event("submitted", -4)])
    _lines(folder.events_file("attempt"), [_event("started", -2, pid=1), _event("exited", seconds + 1, code=0)])
    _lines(folder.samples_file("node"), [_sample(tick / 2 - 2) for tick in range(int(2 * seconds) + 8)])
    return folder.run_id


def _steps(folder: RunDir, what: Cell, repeat: int) -> float:
    """Write the step records of every rank. Returns the duration of all steps in seconds."""
    total = (what.steps or 0) + what.warmup_steps
    for rank in range(what.gpus):
        records: list[Record] = []
        now = 0.0
        for index in range(total):
            ms = 50 + 10 * math.sin(1.7 * index + rank) + repeat
            now += (60 + repeat) / 1000
            warmup = index < what.warmup_steps
            records.append(
                StepRecord(
                    schema=SCHEMA, step=index + 1 - (0 if warmup else what.warmup_steps), t_s=1000.5 + now,
                    wall_s=START_S + now, units=512 // what.gpus, step_ms=ms, loss=2 + 5 * math.exp(-index / 17 + rank / 99),
                    data_ms=ms / 31, forward_ms=ms / 3, backward_ms=ms / 2.1, optimizer_ms=ms / 9,
                    rss_bytes=400 * MIB + 4096 * index, warmup=warmup,
                )
            )  # fmt: skip
        _lines(folder.steps_file(rank), records)
    return total * (60 + repeat) / 1000


def _lines(path: Path, records: list[Record]) -> None:
    with LineWriter(path):  # LineWriter is used only because it creates the folder of the file
        path.write_bytes(msgspec.json.Encoder().encode_lines(records))


def _event(name: str, after_s: float, **data: int) -> Record:
    return Event(schema=SCHEMA, event=name, writer="attempt", wall_s=START_S + after_s, host="node", data=data)


def _sample(t: float) -> Record:
    names = (("eth0", "physical"), ("ifb0", "virtual"), ("ifb1", "virtual"), ("lo", "loopback"))
    sent = int((t + 10) * 8 * MIB)
    return Sample(
        schema=SCHEMA, t_s=1000.5 + t, wall_s=START_S + t, host="node", boot_id="58e4a51d-7fc1-433b-bdeb-efcca14cd4ff",
        cpu_pct=90 + math.sin(t), memory_used_bytes=2048 * MIB, memory_total_bytes=16384 * MIB, disk_read_bytes=MIB,
        disk_write_bytes=MIB, nics=[NicSample(name=name, kind=kind, rx_bytes=sent, tx_bytes=sent) for name, kind in names],
    )  # fmt: skip


def workspace(path: Path, runs: int, repeats: int, steps: int) -> Workspace:
    """Make a workspace with this number of completed runs. repeats: runs of each cell. steps: timed steps of each run."""
    made, machine = Workspace(path), host.read_host()
    entries = []
    for what in cells(-(-runs // repeats), steps):
        kept = [write(made, what, repeat, machine) for repeat in range(1, min(repeats, runs - repeats * len(entries)) + 1)]
        entries.append({"id": what.name(), "cell": msgspec.to_builtins(what), "runs": kept})
    made.store_expansion(
        Expansion(schema=1, name="sweep", title="Learning rates", path="sweep.yaml", cells=entries, excluded=[])
    )
    return made


class ProcessCost(NamedTuple):
    """The cost of a process together with its child processes.

    seconds: wall-clock time. cpu_s: processor time in seconds. mb: peak memory in 1e6 bytes.
    """

    seconds: float
    cpu_s: float
    mb: float


def cost(command: list[str], stdout: IO[str] | int = subprocess.DEVNULL) -> ProcessCost:
    """Run a command and measure its cost. A failure of the command ends the benchmark."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    began, used, most = time.perf_counter(), _cpu_s(), 0
    with subprocess.Popen(command, env=environment, stdout=stdout) as child:
        while child.poll() is None:
            try:
                tree = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
                most = max(most, sum(one.memory_info().rss for one in tree))
            except psutil.NoSuchProcess:
                continue
            # not more often, because reading the memory of the processes takes processor time from the command
            time.sleep(0.25)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}")
    return ProcessCost(time.perf_counter() - began, _cpu_s() - used, most / 1e6)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="(default: 10000)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of a cell (default: 3)")
    parser.add_argument("--steps", type=int, default=50, help="timed steps of a run (default: 50)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--profile", action="store_true", help="once more, saying where the time went")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = workspace(Path(temporary), arguments.runs, arguments.repeats, arguments.steps).path
        written = [file.stat().st_size for file in (path / "runs").glob("**/*") if file.is_file()]
        programs = {"collect summarize": [*SUMMARIZE, temporary], "reading alone": [sys.executable, "-c", READ, temporary]}
        costs: dict[str, list[ProcessCost]] = {name: [] for name in programs}
        for _ in range(arguments.rounds):
            for name, command in programs.items():
                costs[name].append(cost(command))
        if arguments.profile:
            subprocess.run([*PROFILE, temporary], check=True)
    rounds = f"median of {arguments.rounds} rounds, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    print(f"{arguments.runs} runs, {len(written)} files, {sum(written) / 1e6:.0f} MB; {rounds}")
    alone = statistics.median(one.cpu_s for one in costs["reading alone"])
    for name, found in costs.items():
        seconds, cpu_s = (statistics.median(values) for values in list(zip(*found))[:2])
        mb = max(one.mb for one in found)
        print(f"{name:18} {seconds:7.2f} s {cpu_s:7.2f} CPU s {mb:7.0f} MB {cpu_s / alone:6.2f} times the CPU of reading alone")


if __name__ == "__main__":
    main()
