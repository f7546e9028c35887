"""A run of a matrix as metrics, figures and tables use it: its records, and frames that are computed from them once."""

from __future__ import annotations

from functools import cached_property
from typing import Self

import msgspec
import polars as pl

from collect.loading import telemetry
from collect.loading.records import RunRecords
from collect.loading.telemetry import Coverage
from collect.sources import memory, samples, steps
from collect.sources.memory import MemoryCurves
from collect.sources.samples import Interface, Samples, Seen
from collect.sources.steps import Frames, Recorded
from collect.traces import run_traces
from collect.traces.breakdown import Breakdown
from collect.traces.run_traces import RunTraces
from shardlab.cell import Cell
from shardlab.record import Sample
from shardlab.run import RunIdParts, parts_of
from shardlab.study import Traces

PART = 5_000  # samples after which frames are made: records need several times the memory of frames


class Quantity(msgspec.Struct, frozen=True):
    """A number with its unit."""

    value: int | float
    unit: str
    kind: str = ""  # what was measured, if a metric can be measured in several ways, such as `counter`


class LoadedRun(RunRecords, dict=True):
    """One run. If the run has no run.json, its frames are empty, because the number of ranks is not known.

    `read_many` makes the frames of many runs at once and then drops the records.
    """

    # Host, taken from the name of the file -> its samples, without those that are in `sample_parts`.
    sample_records: dict[str, list[Sample]] = msgspec.field(default_factory=dict)
    reads_traces: Traces = "exact"
    quantities: dict[str, Quantity] | None = None  # metrics by name; None until `collect.metric.quantities` computes them

    @property
    def repeat(self) -> int:
        """The number of the repeat, from 1, taken from the run id."""
        return self._parts.repeat

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1, taken from the run id."""
        return self._parts.attempt

    @property
    def _parts(self) -> RunIdParts:
        parts = parts_of(self.run_id)
        assert parts is not None, self.run_id
        return parts

    @property
    def completed(self) -> bool:
        """Whether the run has the state `completed`."""
        return self.verdict.state == "completed"

    @property
    def resumed(self) -> bool:
        """Whether the run has a result and resumed from a checkpoint."""
        return self.result is not None and self.result.resumed

    @property
    def cell(self) -> Cell:
        """The cell in run.json. Only for runs that have a run.json; completed runs always have a run.json."""
        assert self.run is not None
        return self.run.cell

    @property
    def recorded(self) -> Recorded:
        """The step records with the number of ranks, from which the frames of steps are made."""
        return Recorded(self.step_records, self.cell.gpus, self.cell.dp) if self.run else Recorded({})

    @cached_property
    def step_frames(self) -> Frames:
        """The frames of the steps: all steps, the timed steps, and the timed steps over all ranks."""
        return steps.frames(self.recorded)

    @property
    def steps(self) -> pl.DataFrame:
        """Every recorded step, one row per step and rank."""
        return self.step_frames.every

    @property
    def timed(self) -> pl.DataFrame:
        """The timed steps that every rank recorded, one row per step and rank, without warm-up."""
        return self.step_frames.timed

    @property
    def world(self) -> pl.DataFrame:
        """The same steps as `timed`, one row per step (`steps.of_world`)."""
        return self.step_frames.world

    @cached_property
    def undisturbed(self) -> pl.DataFrame:
        """The rows of `world` that no instrument slowed down. Times are computed from these rows."""
        return steps.undisturbed(self.timed, self.world)

    @cached_property
    def window(self) -> tuple[float, float] | None:
        """(first, last) wall_s of the timed steps in seconds since the epoch (`steps.window`)."""
        return steps.window(self.timed)

    @property
    def count(self) -> int:
        """The number of records in memory."""
        return super().count + sum(map(len, self.sample_records.values()))

    def _add_samples(self, host: str, samples_of_host: list[Sample]) -> None:
        super()._add_samples(host, samples_of_host)
        self.sample_records[host] = samples_of_host
        if sum(map(len, self.sample_records.values())) >= PART:
            self.sample_parts.append(samples.part([self.sample_records]))
            self.sample_records = {}

    @cached_property
    def sample_parts(self) -> list[Samples]:
        """Frames of samples that were made while the files were read, as `samples.part` returns them."""
        return []

    @cached_property
    def samples(self) -> Samples:
        """All samples of telemetry, also those outside of the timed window."""
        return samples.frames(self.sample_records, self.sample_parts)

    @property
    def whole_samples(self) -> Samples:
        """The samples from which metrics are computed. Empty for a resumed run, because its telemetry is not complete.

        Each metric selects the timed window itself, because counters also need the samples just before and after the window.
        """
        return samples.frames({}) if self.resumed else self.samples

    @cached_property
    def gpu_samples(self) -> pl.DataFrame:
        """The rows of `whole_samples.gpus` for the GPUs that the ranks trained on.

        If the result does not name these GPUs, as in older releases, the rows of all GPUs of the hosts.
        """
        gpus = self.whole_samples.gpus
        used = self.result.gpus if self.result else None
        return gpus if used is None else gpus.filter(pl.col("uuid").is_in(used))

    @cached_property
    def interfaces(self) -> dict[Interface, list[Seen]]:
        """The counter of sent bytes of each network interface at the time of each sample, from `whole_samples.nics`."""
        return samples.of_interfaces(self.whole_samples.nics, "tx_bytes")

    @cached_property
    def coverage(self) -> list[Coverage]:
        """How much of the timed window the samples of each host cover.

        Empty for a resumed run, because its steps lie in several windows.
        """
        if self.resumed:
            return []
        hosts = [host.host for host in self.hosts]
        steps_of = self.clock_steps
        return telemetry.coverage(self.run_id, self.timed, self.samples, hosts, self.sampler_ends, self.clocks, steps_of)

    @cached_property
    def clock_steps(self) -> dict[str, float]:
        """By how many seconds the clock of each host was set, for hosts whose clock was set (`telemetry.clock_steps`)."""
        return telemetry.clock_steps(self.samples.hosts)

    @property
    def clock_stepped(self) -> bool:
        """Whether the clock of a host was set while the host was sampled.

        In this case it is not certain which samples are within the timed window.
        """
        return bool(self.clock_steps)

    @cached_property
    def memory(self) -> MemoryCurves | None:
        """The memory of rank 0 during one step, if an instrument recorded it."""
        return memory.read(self.folder.memory_file(0))

    @cached_property
    def traces(self) -> RunTraces:
        """The values computed from the traces of the profiled ranks."""
        return run_traces.read(self.folder.path, self.reads_traces) if self.profiled else RunTraces()

    @cached_property
    def breakdowns(self) -> list[Breakdown]:
        """The breakdowns of the profiled ranks whose trace is complete: exact or as HTA reads traces, as the matrix asks."""
        return self.traces.judged

    def with_breakdowns(self, breakdowns: list[Breakdown]) -> Self:
        """A copy of the run with other breakdowns, to compare two ways of reading its traces."""
        copy = msgspec.structs.replace(self, quantities=None)
        copy.__dict__.update(self.__dict__, breakdowns=breakdowns)
        return copy
