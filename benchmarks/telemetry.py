"""Measures the wall-clock time, CPU time and peak memory that reading the telemetry of one long run takes.

    python benchmarks/telemetry.py [--nodes 64] [--gpus 8] [--seconds 3600] [--hz 1] [--rounds 3]

Writes one completed run of this size as samplers leave it: for each node a file with samples of GPUs, network interfaces, RDMA
ports and the cores of the processor. Then a process reads the run as `collect summarize` does, and computes the coverage of
each node and all metrics of the run: without the cache of samples, for the first time, when it makes the cache, later with the
cache, and with `--verify`. The time is from the start of reading, without the start of Python and its imports. The memory is
that of all processes together.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
from small_cell import cell
from summarize import cost

from shardlab.files import files, own_folder
from shardlab.hardware import host
from shardlab.matrix.cell import Cell
from shardlab.runs.record import SCHEMA, Event, GpuSample, NicSample, RdmaSample, Record, Result, Sample, StepRecord
from shardlab.runs.run import Run, World, make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

START_S = 1_760_000_000.0  # seconds since the epoch
CORES = 64
STEPS = 60
READ = """
import sys, time
from pathlib import Path
from collect import metric
from collect.loading import sample_cache
from collect.reading import read_many
from shardlab.files import gc_pause
metric.load_metrics()
sample_cache.LEAST_CACHED_BYTES = 2**62 if sys.argv[3] == "decode" else sample_cache.LEAST_CACHED_BYTES
began = time.perf_counter()
with gc_pause.pause_collector():
    (run,) = read_many.read_runs(Path(sys.argv[1]) / "runs", [sys.argv[2]], "verify" if sys.argv[3] == "verify" else "read")
assert run.completed, (run.verdict, run.damage.describe())
quantities = metric.compute_quantities(run)
covered = [entry.coverage_pct for entry in run.coverage]
print(time.perf_counter() - began, run.samples.hosts.height, run.samples.gpus.height, len(covered), len(quantities))
"""


class Measured(NamedTuple):
    """The median of the times, the largest peak of the memory, and what the process printed."""

    seconds: float
    cpu_s: float
    mb: float
    printed: list[str]

    def line(self, what: str) -> str:
        """A line of the table. what: how the run was read."""
        return f"{what:20} {self.seconds:6.2f} s  {self.cpu_s:6.2f} CPU s  {self.mb:6.0f} MB"


def write(workspace: Workspace, nodes: int, gpus: int, seconds: float, hz: float) -> RunDir:
    """Write a completed run with the samples of all nodes, at `hz` samples per second. gpus: the number of GPUs of each
    node."""
    world = nodes * gpus
    what: Cell = cell("gpt2-tiny", world, strategy="ddp", gpus=world, dp=world, nnodes=nodes, steps=STEPS)
    machine = host.read_host()
    folder = RunDir(workspace.runs / make_run_id(what, 1))
    for inside in (folder.path / "env", folder.steps_file(0).parent, folder.samples_file("node").parent):
        files.make_folder(inside)
    run = Run(
        schema=1, run_id=folder.run_id, matrix="long", cell=what, cell_hash=what.hash(), repeat=1, attempt=1,
        launcher="torchrun", rehearsal=False, world=World(nodes, gpus, world), cluster={"name": "c", "provider": "slurm"},
        data_path="/data", versions=machine.packages, git_commit=None, templates={}, created="2026-01-01T00:00:00Z",
    )  # fmt: skip
    names = [f"node{number:03d}" for number in range(nodes)]
    uuids = {name: [f"GPU-{name}-5b1f-4c43-{gpu:012d}" for gpu in range(gpus)] for name in names}
    result = Result(
        schema=1, run_id=folder.run_id, state="completed", rehearsal=False, steps=what.steps or 0, unit="tokens",
        gpus=[uuid for of_node in uuids.values() for uuid in of_node],
    )  # fmt: skip
    files.write_json(folder.run_json, run, sync=False)
    files.write_json(folder.result, result, sync=False)
    step_s = seconds / STEPS  # few steps, because what is measured here is the telemetry
    steps = [
        StepRecord(schema=SCHEMA, step=number, t_s=1000 + at_s, wall_s=START_S + at_s, units=64, step_ms=1e3 * step_s)
        for number, at_s in ((number, number * step_s) for number in range(1, STEPS + 1))
    ]
    for rank in range(world):
        _lines(folder.steps_file(rank), steps)
    at = {"rendered": -3.0, "started": -2.0, "exited": seconds + 1.0}
    events: list[Record] = [
        Event(
            schema=SCHEMA, event=event, writer="attempt", wall_s=START_S + after_s, host=names[0],
            data={"code": 0} if event == "exited" else {},
        )
        for event, after_s in at.items()
    ]  # fmt: skip
    _lines(folder.events_file("attempt"), events)
    chance = random.Random(1)
    first = msgspec.json.Encoder().encode_lines(
        [_sample(names[0], uuids[names[0]], tick / hz, chance) for tick in range(int(seconds * hz) + 3)]
    )
    # all nodes get the samples of the first node, because making other numbers for each node would take minutes
    for name in names:
        files.write_json(folder.environment_file(name), msgspec.structs.replace(machine, host=name), sync=False)
        folder.samples_file(name).write_bytes(first.replace(names[0].encode(), name.encode()))
    return folder


def measured(workspace: Path, run_id: str, rounds: int, how: str) -> Measured:
    """Read the run in processes of their own. rounds: how often. how: `decode` (without the cache), `first` (the cache is made
    each time), `later` or `verify`."""
    costs, seconds = [], []
    for _ in range(rounds):
        if how == "first":
            shutil.rmtree(cache_folder(), ignore_errors=True)
        with (workspace / "answer").open("w") as stdout:
            costs.append(cost([sys.executable, "-c", READ, str(workspace), run_id, how], stdout=stdout))
        printed = (workspace / "answer").read_text().split()
        seconds.append(float(printed[0]))
    cpu_s = statistics.median(one.cpu_s for one in costs)
    return Measured(statistics.median(seconds), cpu_s, max(one.mb for one in costs), printed[1:])


def cache_folder() -> Path:
    """The folder of the cache of samples."""
    return own_folder.make_cache_path("telemetry")


def _lines(path: Path, records: list[Record]) -> None:
    path.write_bytes(msgspec.json.Encoder().encode_lines(records))


def _sample(name: str, uuids: list[str], t: float, chance: random.Random) -> Sample:
    sent = int((t + 10) * 1e9) + chance.randrange(1000)
    gpus = [
        GpuSample(
            uuid=uuid, utilization_pct=float(chance.randrange(101)), memory_used_bytes=chance.randrange(80 << 30),
            power_w=chance.randrange(700_000) / 1000, temperature_c=float(chance.randrange(30, 90)), sm_clock_mhz=1980.0,
            memory_clock_mhz=2619.0, energy_j=500 * t + chance.random(), pcie_rx_bytes=sent, pcie_tx_bytes=sent,
            nvlink_rx_bytes=8 * sent, nvlink_tx_bytes=8 * sent, ecc_corrected=0, ecc_uncorrected=0, processes=1,
            throttled=["power_cap"] if chance.random() < 0.1 else [], xids=[],
        )
        for uuid in uuids
    ]  # fmt: skip
    zeros = dict.fromkeys(("rx_errors", "tx_errors", "rx_dropped", "tx_dropped"), 0)
    nics = [
        NicSample(name="lo", kind="loopback", rx_bytes=1, tx_bytes=1, rx_packets=1, tx_packets=1, **zeros),
        NicSample(
            name="eth0", kind="physical", mac="0c:42:a1:00:00:01", pci="0000:31:00.0", rx_bytes=sent, tx_bytes=sent,
            rx_packets=sent // 1500, tx_packets=sent // 1500, **zeros,
        ),
    ]  # fmt: skip
    rdma = [RdmaSample(device="mlx5_0", port=1, link_layer="InfiniBand", rx_bytes=sent, tx_bytes=sent)]
    return Sample(
        schema=SCHEMA, t_s=1000.5 + t, wall_s=START_S + t, host=name, boot_id="58e4a51d-7fc1-433b-bdeb-efcca14cd4ff",
        cpu_pct=chance.randrange(1000) / 10, cores_pct=[chance.randrange(1000) / 10 for _ in range(CORES)],
        memory_used_bytes=chance.randrange(1 << 38), memory_total_bytes=1 << 38, disk_read_bytes=sent, disk_write_bytes=sent,
        gpus=gpus, nics=nics, rdma=rdma,
    )  # fmt: skip


def main() -> None:
    """Print the size of the run, and the cost of reading it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=8, help="of each node (default: 8)")
    parser.add_argument("--seconds", type=float, default=3600, help="(default: 3600)")
    parser.add_argument("--hz", type=float, default=1, help="samples per second (default: 1)")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        folder = write(Workspace(Path(name)), given.nodes, given.gpus, given.seconds, given.hz)
        costs = {how: measured(Path(name), folder.run_id, given.rounds, how) for how in ("decode", "first", "later", "verify")}
        lines_mb, cache_mb = (
            sum(path.stat().st_size for path in parent.glob("*")) / 1e6
            for parent in (folder.samples_file("node").parent, cache_folder())
        )
        hosts, gpus, covered, metrics = costs["decode"].printed
        print(f"{given.nodes} nodes, {lines_mb:.0f} MB of lines, {cache_mb:.1f} MB of cache, {os.cpu_count()} processors")
        print(f"{hosts} samples of hosts, {gpus} of GPUs -> coverage of {covered} nodes, {metrics} metrics")
        titles = {"decode": "without the cache", "first": "first load", "later": "later load", "verify": "with --verify"}
        for how, title in titles.items():
            ratio = costs[how].cpu_s / costs["decode"].cpu_s
            print(f"{costs[how].line(title)}  {ratio:.3f} times the CPU time of decoding")


if __name__ == "__main__":
    main()
