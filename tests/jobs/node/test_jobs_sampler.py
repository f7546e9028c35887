"""If the telemetry sampler of a run dies, its end is recorded, a new sampler is started, and the run's output says so."""

import sys

import msgspec
from support_cells import CELL
from support_e2e import HANG_S

from shardlab.matrix.cell import Instruments
from shardlab.runs.record import SAMPLER_ENDED, Sample, read_records
from tests.jobs.supervisor.test_jobs_attempt import folder, supervised, write_run  # noqa: F401 - `folder` is a fixture

# A Python script that takes the place of a rank. It kills the sampler of its run as often as its argument says, each time after
# a sample, and then waits for one more sample.
RANK = """
import os, signal, sys, time
from pathlib import Path
import psutil
folder, kills, limit_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

def until(true):
    ends = time.monotonic() + limit_s
    while not true() and time.monotonic() < ends:
        time.sleep(0.02)

def samplers():
    return [p for p in psutil.Process(os.getppid()).children() if "sample" in p.cmdline() and p.status() != "zombie"]

def written():
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("samples/*.jsonl"))

def recorded():
    return sum(path.read_text().count('"sampler_ended"') for path in folder.glob("events.node-*.jsonl"))

for kill in range(kills + 1):
    before = written()
    until(lambda: written() > before or (kill >= 4 and not samplers()))
    if kill < kills:
        for process in samplers():
            process.send_signal(signal.SIGKILL)
            process.wait()
until(lambda: recorded() >= min(kills, 4))  # after the fourth end, no sampler is started
time.sleep(0.2)  # a fifth sampler would write a sample
"""


def killed(folder, kills):  # noqa: F811
    done = supervised(folder, sys.executable, "-c", RANK, str(folder.path), str(kills), str(HANG_S))
    assert done.returncode == 0, done.stderr
    (samples,) = (folder.path / "samples").glob("*.jsonl")
    return [event.data["code"] for event in folder.read_events() if event.event == SAMPLER_ENDED], read_records(samples, Sample)


def test_a_sampler_that_is_killed_is_started_again_and_the_run_goes_on(folder):  # noqa: F811
    codes, lines = killed(folder, 2)
    assert codes == [-9, -9]
    assert sum(sample.started_hz is not None for sample in lines.records) == 3
    assert folder.judge().state != "failed" or "sampler" not in folder.judge().why


def test_a_sampler_that_dies_again_and_again_is_left_alone(folder):  # noqa: F811
    codes, lines = killed(folder, 5)
    assert codes == [-9] * 4
    assert sum(sample.started_hz is not None for sample in lines.records) == 4


def test_a_sampler_that_lives_is_not_named(folder):  # noqa: F811
    codes, lines = killed(folder, 0)
    assert codes == []
    assert next(sample.started_hz for sample in lines.records) == 2


def test_the_cell_sets_the_rate(folder):  # noqa: F811
    cell = msgspec.structs.replace(CELL, instruments=Instruments(telemetry_hz=12.5))
    write_run(folder, cell=msgspec.to_builtins(cell))
    _, lines = killed(folder, 0)
    assert next(sample.started_hz for sample in lines.records) == 12.5
