"""A run of a matrix as metrics, figures and tables use it: its records, and frames that are computed from them once."""

from __future__ import annotations

from functools import cached_property
from typing import Self

import msgspec
import polars as pl

from collect.loading import telemetry
from collect.loading.records import RunRecords
from collect.loading.telemetry import Coverage
from collect.sources import memory, samples, snapshot, steps
from collect.sources.memory import MemoryCurves
from collect.sources.samples import Interface, Samples, Seen
from collect.sources.snapshot import AllocatorSnapshot
from collect.sources.steps import Frames, Recorded
from collect.traces import run_traces
from collect.traces.breakdown import Breakdown
from collect.traces.run_traces import RunTraces
from shardlab import prediction
from shardlab.cell import Cell
from shardlab.prediction import Prediction
from shardlab.record import Sample
from shardlab.run import RunIdParts, parts_of
from shardlab.study import Traces

PART = 5_000  # after this number of samples, they are moved into frames: records need several times the memory of frames


class Quantity(msgspec.Struct, frozen=True):
    """The value of a metric: a number with its unit."""

    value: int | float
    unit: str
    kind: str = ""  # what was measured, if a metric can be measured in several ways, such as `counter`


class LoadedRun(RunRecords, dict=True):
    """One run. If the run has no run.json, its frames are empty, because the number of ranks is not known.

    `read_many` makes the frames of many runs at once and then drops the records.
    """

    # Host name (taken from the name of the file) -> the samples of this host that are not yet in `sample_parts`.
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
        """The step records and the number of ranks. The frames of steps are made from both."""
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
        """The timed steps that every rank recorded, one row per step over all ranks (`steps.of_world`), without warm-up."""
        return self.step_frames.world

    @cached_property
    def undisturbed(self) -> pl.DataFrame:
        """The rows of `world` for steps that no instrument slowed down. Times are computed from these rows."""
        return steps.undisturbed(self.timed, self.world)

    @cached_property
    def window(self) -> tuple[float, float] | None:
        """(end of the first timed step, end of the last timed step), in seconds since the epoch (`steps.window`)."""
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
        """The frames that were made from samples while the files were read, as `samples.part` returns them."""
        return []

    @cached_property
    def predicted(self) -> Prediction | None:
        """What the planner predicted before the run was submitted; None if there is no prediction, or if it is damaged."""
        return prediction.read(self.folder.path)

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
        """The rows of `whole_samples.gpus` for the GPUs that the ranks trained on, without GPUs that a stub of NVML played.

        Results of older releases of shardlab do not name these GPUs; then the rows of all GPUs of the hosts are returned.
        """
        gpus = samples.measured(self.whole_samples.gpus)
        used = self.result.gpus if self.result else None
        if used is None or set(gpus["uuid"].unique()) <= set(used):
            return gpus  # a filter would copy all rows
        return gpus.filter(pl.col("uuid").is_in(used))

    @property
    def plays_gpus(self) -> bool:
        """Whether a stub of NVML played GPUs in this run. Figures mark the samples of played GPUs, and no metric uses them."""
        return bool(self.samples.gpus["played"].any())

    @cached_property
    def shown_gpu_samples(self) -> pl.DataFrame:
        """The GPU samples that figures show: of the played GPUs if a stub of NVML played GPUs, else `gpu_samples`."""
        return self.whole_samples.gpus.filter("played") if self.plays_gpus else self.gpu_samples

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
        """Host whose clock was set during the run -> by how many seconds (`telemetry.clock_steps`)."""
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
    def snapshot(self) -> AllocatorSnapshot | None:
        """The snapshot of rank 0's CUDA allocator after one step, if an instrument wrote it."""
        return snapshot.read(self.folder.snapshot_file(0)) if self.cell.instruments.memory == "snapshot" else None

    @cached_property
    def traces(self) -> RunTraces:
        """The values computed from the traces of the profiled ranks."""
        return run_traces.read(self.folder.path, self.reads_traces) if self.profiled else RunTraces()

    @cached_property
    def breakdowns(self) -> list[Breakdown]:
        """The breakdowns of the profiled ranks whose trace is complete.

        The key `traces` of the matrix says whether they are exact or computed as HTA (Holistic Trace Analysis) does.
        """
        return self.traces.judged

    def with_breakdowns(self, breakdowns: list[Breakdown]) -> Self:
        """A copy of the run with other breakdowns, to compare two ways of reading its traces."""
        copy = msgspec.structs.replace(self, quantities=None)
        copy.__dict__.update(self.__dict__, breakdowns=breakdowns)
        return copy
