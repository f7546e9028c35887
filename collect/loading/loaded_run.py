"""A run as metrics, figures and tables use it: its records, and frames that are computed once from these records."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Self

import msgspec
import polars as pl

from collect.loading import telemetry
from collect.loading.records import RunRecords
from collect.loading.sample_cache import CachedSamples
from collect.loading.telemetry import Coverage
from collect.sources import memory, samples, snapshot, steps
from collect.sources.device_rows import CounterValues, DeviceKey, DeviceRows
from collect.sources.memory import MemoryCurves
from collect.sources.samples import INTERFACE_KEYS, Samples
from collect.sources.snapshot import AllocatorHistory, AllocatorSnapshot
from collect.sources.steps import RecordedSteps, StepFrames
from collect.traces import run_traces
from collect.traces.breakdown import Breakdown
from collect.traces.run_traces import RunTraces
from shardlab.hardware import nccl_log
from shardlab.hardware.nccl_log import NcclTransports
from shardlab.matrix.cell import AnyCell, Cell
from shardlab.matrix.study import Traces
from shardlab.runs import prediction
from shardlab.runs.prediction import Prediction
from shardlab.runs.record import Sample
from shardlab.runs.run import STEP_UNIT, RunIdParts, parse_run_id
from shardlab.runs.state import IMPORTED

# Samples are moved into frames when there are this many: as records, they need several times more memory. With parts of 2,500
# samples, a run of 230,000 samples needed a third more memory and as much time.
MOST_SAMPLE_RECORDS = 500


class Quantity(msgspec.Struct, frozen=True):
    """The value of a metric: a number with its unit."""

    value: int | float
    unit: str
    kind: str = ""
    """What was measured, if a metric can be measured in several ways, such as `counter`."""


class LoadedRun(RunRecords, dict=True):
    """A run with its records and frames, which are empty without a run.json, because the number of ranks is not known.

    `read_many` makes the frames of many runs at once and then drops the records.
    """

    needs_frames: ClassVar[bool] = True
    sample_records: dict[str, list[Sample]] = msgspec.field(default_factory=dict)
    """Name of a host (taken from the name of its file) -> the samples of this host that are not yet in `sample_parts`."""
    trace_method: Traces = "exact"
    quantities: dict[str, Quantity] | None = None
    """Metrics by name, from `collect.metric.compute_quantities`."""

    @property
    def repeat(self) -> int:
        """The number of the repeat, from 1, taken from the run id."""
        return self._id_parts.repeat

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1, taken from the run id."""
        return self._id_parts.attempt

    @property
    def _id_parts(self) -> RunIdParts:
        id_parts = parse_run_id(self.run_id)
        assert id_parts is not None, self.run_id
        return id_parts

    @property
    def completed(self) -> bool:
        """Whether metrics are computed from the run: it has the state `completed`, or was imported."""
        return self.verdict.state in ("completed", IMPORTED)

    @property
    def resumed(self) -> bool:
        """Whether the run has a result and resumed from a checkpoint."""
        return self.result is not None and self.result.resumed

    @property
    def cell(self) -> AnyCell:
        """The cell in run.json. Raises AssertionError for a run without one; all completed runs have one."""
        assert self.run is not None
        return self.run.cell

    @property
    def training_cell(self) -> Cell | None:
        """The cell in run.json if shardlab trains it; None for any other run."""
        return self.run.cell if self.run is not None and isinstance(self.run.cell, Cell) else None

    @property
    def recorded_steps(self) -> RecordedSteps:
        """The step records and the number of ranks, from which the frames of steps are made."""
        if self.run is None:
            return RecordedSteps({})
        if self.cell.command is not None:  # as many ranks as told steps, each with data of its own
            reporting_ranks = max(1, sum(map(bool, self.step_records.values())))
            return RecordedSteps(self.step_records, reporting_ranks, reporting_ranks)
        if self.run.imported:  # logs often have the steps of only one rank; a step whose data is not known counts as one unit
            rank_count = len(self.step_records)
            has_data = self.result is not None and self.result.unit != STEP_UNIT
            return RecordedSteps(self.step_records, rank_count, rank_count if has_data else 1)
        lost_worker = self.cell.instruments.lost_worker
        return RecordedSteps(
            self.step_records, self.cell.gpus, self.cell.data_ranks, None if lost_worker is None else lost_worker.step
        )

    @cached_property
    def step_frames(self) -> StepFrames:
        """All steps, the timed steps of each rank, and the timed steps over all ranks."""
        return steps.build_step_frames(self.recorded_steps)

    @property
    def steps(self) -> pl.DataFrame:
        """`StepFrames.all_steps`: every recorded step, one row per step and rank."""
        return self.step_frames.all_steps

    @property
    def timed_steps(self) -> pl.DataFrame:
        """`StepFrames.timed_steps`: the steps that were timed on every rank, one row per step and rank."""
        return self.step_frames.timed_steps

    @property
    def world_steps(self) -> pl.DataFrame:
        """`StepFrames.world_steps`: the steps that were timed on every rank, one row per step over all ranks."""
        return self.step_frames.world_steps

    @cached_property
    def undisturbed_steps(self) -> pl.DataFrame:
        """The rows of `world` for steps that no instrument slowed down. Metrics of time are computed from these rows."""
        return steps.select_undisturbed_steps(self.timed_steps, self.world_steps)

    @cached_property
    def timed_window(self) -> tuple[float, float] | None:
        """The timed window: (end of the first timed step, end of the last timed step), in seconds since the epoch
        (`steps.find_timed_window`). For an imported run without step times, it is the time of its telemetry."""
        timed_window = steps.find_timed_window(self.timed_steps)
        if timed_window is None and self.run is not None and self.run.imported:
            return steps.find_timed_window(self.samples.hosts)
        return timed_window

    @property
    def record_count(self) -> int:
        """The number of step records and samples that are in memory as records."""
        return super().record_count + sum(map(len, self.sample_records.values()))

    def _add_samples(self, host: str, new_samples: list[Sample]) -> None:
        self.sample_records.setdefault(host, []).extend(new_samples)
        if sum(map(len, self.sample_records.values())) >= MOST_SAMPLE_RECORDS:
            self._move_records_to_frames()

    def _add_cached_samples(self, cached_samples: CachedSamples) -> None:
        assert cached_samples.frames is not None
        self._move_records_to_frames()  # they come before the cached samples
        self.sample_parts.append(cached_samples.frames)

    def _move_records_to_frames(self) -> None:
        """Move the samples in `sample_records` into frames."""
        if any(self.sample_records.values()):
            self.sample_parts.append(samples.build_sample_part([self.sample_records]))
            self.sample_records = {}

    @cached_property
    def sample_parts(self) -> list[Samples]:
        """The frames that were made from samples while the files were read, as `samples.build_sample_part` makes them."""
        return []

    @cached_property
    def predicted(self) -> Prediction | None:
        """What the planner predicted before the run was submitted; None if there is no prediction, if it is damaged, or if the
        run has a fault on purpose, which a prediction does not contain."""
        instruments = self.run.cell.instruments if self.run is not None else None
        if instruments is not None and (instruments.straggler is not None or instruments.lost_worker is not None):
            return None
        return prediction.read_prediction(self.folder.path)

    @cached_property
    def samples(self) -> Samples:
        """All samples of telemetry, including samples from before and after the timed steps."""
        return samples.build_sample_frames(self.sample_records, self.sample_parts)

    @property
    def whole_samples(self) -> Samples:
        """The samples from which metrics are computed. Empty for a run that resumed, because its telemetry is not complete.

        Each metric selects the timed window itself, because counters also need the samples just before and after the window.
        """
        return samples.build_sample_frames({}) if self.resumed else self.samples

    @cached_property
    def gpu_samples(self) -> pl.DataFrame:
        """The rows of `whole_samples.gpus` for the GPUs on which the ranks trained, without GPUs that a stub of NVML played.

        The result of a run of an older release does not name these GPUs; then the rows of all GPUs of the hosts are returned.
        """
        real_gpu_samples = samples.select_real_gpus(self.whole_samples.gpus)
        trained_gpus = self.result.gpus if self.result else None
        if trained_gpus is None or set(real_gpu_samples["uuid"].unique()) <= set(trained_gpus):
            return real_gpu_samples  # no row has to be removed, so the frame is not copied by a filter
        return real_gpu_samples.filter(pl.col("uuid").is_in(trained_gpus))

    @property
    def plays_gpus(self) -> bool:
        """Whether a stub of NVML made up the GPU values, which figures mark as played and no metric uses."""
        return bool(self.samples.gpus["played"].any())

    @cached_property
    def shown_gpu_samples(self) -> pl.DataFrame:
        """The GPU samples that figures show: the played samples if there are any, else `gpu_samples`."""
        return self.whole_samples.gpus.filter("played") if self.plays_gpus else self.gpu_samples

    @cached_property
    def gpu_rows(self) -> DeviceRows:
        """The rows of each GPU in `gpu_samples`, named by its host and its UUID."""
        return DeviceRows(self.gpu_samples, ("host", "uuid"))

    @cached_property
    def interface_rows(self) -> DeviceRows:
        """The rows of each network interface in `whole_samples.nics`, named by its host, its kind and its name."""
        return DeviceRows(self.whole_samples.nics, INTERFACE_KEYS)

    @cached_property
    def interfaces(self) -> dict[DeviceKey, CounterValues]:
        """The counter of sent bytes of each network interface, from `whole_samples.nics`."""
        return self.interface_rows.get_counters("tx_bytes")

    @cached_property
    def nccl_transports(self) -> NcclTransports:
        """The transports between ranks in NCCL's lines of all logs of ranks."""
        return nccl_log.read_transports(self.folder.rank_log(rank) for rank in range(self.cell.gpus))

    @cached_property
    def coverage(self) -> list[Coverage]:
        """For each host, how much of the timed window its samples cover.

        Empty for a run that resumed, because its steps lie in several windows.
        """
        if self.resumed:
            return []
        hosts = [host.host for host in self.hosts]
        return telemetry.compute_coverage(
            self.run_id, self.timed_steps, self.samples, hosts, self.sampler_ends, self.clock_offsets, self.clock_steps
        )

    @cached_property
    def clock_steps(self) -> dict[str, float]:
        """The hosts whose clock was set during the run: {host: by how many seconds} (`telemetry.find_clock_steps`)."""
        return telemetry.find_clock_steps(self.samples.hosts)

    @property
    def clock_stepped(self) -> bool:
        """Whether the clock of a sampled host was set, so that it is not certain which samples lie in the timed window."""
        return bool(self.clock_steps)

    @cached_property
    def memory(self) -> MemoryCurves | None:
        """The memory of rank 0 during one step, if an instrument recorded it."""
        return memory.read_memory_curves(self.folder.memory_file(0))

    @cached_property
    def snapshot(self) -> AllocatorSnapshot | None:
        """The snapshot of rank 0's CUDA allocator after one step, if an instrument wrote it."""
        return snapshot.read_snapshot(self.folder.snapshot_file(0)) if self.cell.instruments.memory == "snapshot" else None

    @cached_property
    def allocator_history(self) -> AllocatorHistory | None:
        """The memory after each entry of the history in `snapshot`. Two figures draw it."""
        return snapshot.replay_history(self.snapshot) if self.snapshot else None

    @cached_property
    def traces(self) -> RunTraces:
        """The numbers that are computed from the traces of the profiled ranks."""
        if not self.profiled:
            return RunTraces()
        return run_traces.read_run_traces(self.folder.path, self.trace_method, run_traces.trained_on_gpus(self.result))

    @cached_property
    def breakdowns(self) -> list[Breakdown]:
        """The breakdowns (times of compute, communication and idle) of the profiled ranks whose trace is complete.

        The key `traces` of the matrix says whether the breakdowns are exact, or computed as HTA (Holistic Trace Analysis) does.
        """
        return self.traces.judged_breakdowns

    def with_breakdowns(self, breakdowns: list[Breakdown]) -> Self:
        """A copy of the run with other breakdowns, to compare two ways of computing them from the same traces."""
        run_copy = msgspec.structs.replace(self, quantities=None)
        run_copy.__dict__.update(self.__dict__, breakdowns=breakdowns)
        return run_copy
