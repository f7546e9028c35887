"""Reads the records of many runs in several processes: reading thousands of runs takes most of the time of a report.

A process hands its part over in a temporary file without a name: JSON, MessagePack, and frames as Arrow streams.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import polars as pl

from collect import metric, records, telemetry
from collect.metric import Quantity
from collect.records import Records
from collect.sources import samples, steps
from collect.sources.samples import Samples
from collect.sources.steps import Frames, Recorded, by_run
from collect.telemetry import Coverage
from shardlab.rundir import RunDir

AT_ONCE = 50_000  # step records and samples that wait to become frames: they take several times the memory that those do
MANY = 2_000  # runs from which on others read too: half of fewer are read in the time that it takes to start another
MOST = 4  # processes: one cuts into runs what all have read, and more would wait for it


class Derived(NamedTuple):
    """quantities: the metrics of a completed run, unless there are traces to read for them; coverage: of each host, none of a
    resumed run, whose steps no one stretch of time holds."""

    quantities: dict[str, Quantity] | None
    coverage: list[Coverage]


class Read(NamedTuple):
    """What the folder of a run holds. records: without steps and samples, which are in the frames."""

    records: Records
    steps: Frames
    samples: Samples
    derived: Derived


class _Quantity(msgspec.Struct):
    """As received: what was counted is a whole number, and stays one."""

    value: int | float
    unit: str
    kind: str


class _Batch(NamedTuple):
    """What those of some runs hold. Column `run` of the frames is the place of a run among them."""

    run_ids: Sequence[str]
    records: Sequence[Records]
    steps: Frames
    samples: Samples
    derived: Iterable[Derived] | None = None  # where that is computed already

    def runs(self) -> Iterator[Read]:
        of_steps = list(map(Frames, *(by_run(rows, len(self.records)) for rows in self.steps)))
        of_samples = list(map(Samples, *(by_run(rows, len(self.records)) for rows in self.samples)))
        derived = self.derived or map(_derived, self.run_ids, self.records, of_steps, of_samples)
        return map(Read, self.records, of_steps, of_samples, derived)


def read(runs: Path, run_ids: Sequence[str]) -> Iterator[Read]:
    """These runs, in their order. Raises WorkspaceError where a file is there and cannot be opened."""
    processes = min(len(os.sched_getaffinity(0)), MOST) if len(run_ids) >= MANY else 1
    size = -(-len(run_ids) // processes)
    with contextlib.ExitStack() as others:
        answers = [others.enter_context(_another(runs, run_ids[size * one : size * (one + 1)])) for one in range(1, processes)]
        for batches in (_read(runs, run_ids[:size]), *answers):
            for batch in batches:
                yield from batch.runs()


def _read(runs: Path, run_ids: Sequence[str]) -> Iterator[_Batch]:
    pending: dict[str, Records] = {}
    count = 0
    for run_id in run_ids:
        found = pending[run_id] = records.read(RunDir(runs / run_id))
        count += found.count
        if count > AT_ONCE:
            yield _batch(list(pending), list(pending.values()))
            pending, count = {}, 0
    yield _batch(list(pending), list(pending.values()))


def _batch(run_ids: Sequence[str], found: Sequence[Records]) -> _Batch:
    recorded = [Recorded(one.steps, one.run.cell.gpus, one.run.cell.dp) if one.run else Recorded({}) for one in found]
    rest = [msgspec.structs.replace(one, steps={}, samples={}) for one in found]
    return _Batch(run_ids, rest, steps.of_runs(recorded), samples.of_runs([one.samples for one in found]))


def _derived(run_id: str, found: Records, of_steps: Frames, of_samples: Samples) -> Derived:
    resumed = found.result is not None and found.result.resumed
    seen = (of_steps.timed, of_samples.hosts, [host.host for host in found.hosts])
    coverage = [] if resumed else telemetry.coverage(run_id, *seen)
    return Derived(_quantities(found, of_steps, of_samples), coverage)


def _quantities(found: Records, of_steps: Frames, of_samples: Samples) -> dict[str, Quantity] | None:
    if found.run is None or found.verdict.state != "completed" or found.profiled:
        return None
    told = (found.result, found.hosts, found.validation)
    run = metric.measured(found.run.cell, of_steps, of_samples, *told, paused=found.paused)
    return metric.quantities(run)


@contextlib.contextmanager
def _another(runs: Path, run_ids: Sequence[str]) -> Iterator[Iterator[_Batch]]:
    """Another process reads these runs meanwhile: what it has read, or where it could not, what this one reads then."""
    command = [sys.executable, "-P", "-m", __name__]  # -P: a folder `collect` in the current folder is not our package
    with contextlib.ExitStack() as stack:
        try:
            asked, answer = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            asked.write(msgspec.json.encode((str(runs), run_ids)))
            asked.seek(0)
            process = subprocess.Popen(command, stdin=asked, stdout=answer, stderr=subprocess.DEVNULL)
        except OSError:  # there is no room for the files, or for a process
            yield _read(runs, run_ids)
            return
        try:
            yield _answered(process, answer, runs, run_ids)
        finally:
            process.kill()
            process.wait()


def _answered(process: subprocess.Popen[bytes], answer: IO[bytes], runs: Path, run_ids: Sequence[str]) -> Iterator[_Batch]:
    if process.wait():  # for want of memory or of room, or for a file that cannot be opened, which is then said
        yield from _read(runs, run_ids)
        return
    answer.seek(0)
    while line := answer.readline():
        yield _received(answer, msgspec.json.decode(line, type=list[int]))


def _sent(batch: _Batch) -> list[bytes]:
    told = [run.derived for run in batch.runs()]
    # The second is not in JSON, which has no NaN, as a metric may be.
    parts = [msgspec.json.encode((batch.run_ids, batch.records)), msgspec.msgpack.encode(told)]
    for rows in (*batch.steps, *batch.samples):
        rows.write_ipc_stream(stream := io.BytesIO())
        parts.append(stream.getvalue())
    return parts


def _received(answer: IO[bytes], sizes: Sequence[int]) -> _Batch:
    rest, told, *parts = (answer.read(size) for size in sizes)
    frames = [pl.read_ipc_stream(part) for part in parts]
    run_ids, found = msgspec.json.decode(rest, type=tuple[list[str], list[Records]])
    return _Batch(run_ids, found, Frames(*frames[:3]), Samples(*frames[3:]), _told(told))


def _told(answer: bytes) -> Iterator[Derived]:
    for one, coverage in msgspec.msgpack.decode(answer, type=list[tuple[dict[str, _Quantity] | None, list[Coverage]]]):
        if one is None:
            yield Derived(None, coverage)
        else:
            yield Derived({name: Quantity(sent.value, sent.unit, sent.kind) for name, sent in one.items()}, coverage)


def _answer() -> None:
    """Read the runs that standard input names, and write them to standard output."""
    gc.disable()
    runs, run_ids = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[str, list[str]])
    for batch in _read(Path(runs), run_ids):
        parts = _sent(batch)
        sys.stdout.buffer.write(msgspec.json.encode(list(map(len, parts))) + b"\n")
        sys.stdout.buffer.writelines(parts)


if __name__ == "__main__":
    _answer()
