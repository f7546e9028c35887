"""Collects what the readers of logs find, and turns it into our records: samples of hosts and steps of ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from collect.importing.log_columns import LogColumn
from collect.importing.log_values import LogClock, parse_number
from collect.sampler.nvidia_smi import SMI_COLUMNS
from shardlab.record_types import LARGEST_INTEGER
from shardlab.runs.record import SCHEMA, GpuSample, NicSample, Sample, StepRecord
from shardlab.runs.run import STEP_UNIT

BOOT_ID = "imported"  # logs do not name the boot of a host
MOST_DEVICES = 4096  # the most devices of one moment; a log with more is damaged
DERIVED_TOLERANCE = 2.0  # a step time without a unit is used if it is at most this factor from the times of the lines
_parse_throttle_reasons = next(column.parse for column in SMI_COLUMNS if column.sample_field == "throttled")


class StepRow(msgspec.Struct):
    """A step in a log. A value that the log does not have is None."""

    step: float | None = None
    rank: float | None = None
    wall_s: float | None = None
    loss: float | None = None
    step_ms: float | None = None
    step_time: float | None = None
    """The time of the step, in a unit that the log does not name."""
    tokens: float | None = None
    samples: float | None = None
    tokens_per_s: float | None = None
    device_tokens_per_s: float | None = None
    """Of one GPU."""
    samples_per_s: float | None = None
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None


class LogRows:
    """What was found in one log."""

    def __init__(self, clock: LogClock, host: str) -> None:
        self.clock, self.host = clock, host
        self.samples: dict[tuple[str, float], Sample] = {}
        self.steps: list[StepRow] = []
        self.unread_count = 0
        """Number of lines that could not be read."""
        self.lacks_times = False
        """Whether values were left out because their time is not known."""
        self.remarks: list[str] = []
        self._moment_s: float | None = None
        self._moment_count = 0
        self._keys_at_moment: set[str] = set()
        self._last_counts: dict[tuple[str, str, str], tuple[float, float]] = {}

    def start_moment(self, time: object, line_key: str) -> float | None:
        """The time of the moment to which a line belongs; None if it is not known.

        The lines of one moment have different keys, such as the names of GPUs. A moment has the time of its first line.
        """
        if line_key in self._keys_at_moment or self._moment_s is None or len(self._keys_at_moment) >= MOST_DEVICES:
            self._keys_at_moment = set()
            moment_s = self.clock.read_time(time) if time is not None else self.clock.compute_line_time(self._moment_count)
            self._moment_count, self._moment_s = self._moment_count + 1, moment_s
            self.lacks_times |= moment_s is None
        self._keys_at_moment.add(line_key)
        return self._moment_s

    def find_or_add_sample(self, wall_s: float, host: str | None = None) -> Sample:
        """The sample of a host at a moment, which is new if there is none yet. host: None for the host of this log."""
        host = host or self.host
        if (host, wall_s) not in self.samples:
            sample = Sample(schema=SCHEMA, t_s=min(wall_s, 3e9), wall_s=wall_s, host=host, boot_id=BOOT_ID, started_hz=0.0)
            self.samples[host, wall_s] = sample
        return self.samples[host, wall_s]

    def add_gpu(
        self, wall_s: float, name: str, values: Mapping[str, object], columns: Mapping[str, LogColumn], host: str | None = None
    ) -> GpuSample:
        """Add the values of a GPU at a moment. values: {name of a column: its text}."""
        host_sample = self.find_or_add_sample(wall_s, host)
        host_sample.gpus = host_sample.gpus or []
        gpu_sample = next((other_gpu for other_gpu in host_sample.gpus if other_gpu.uuid == name), None)
        if gpu_sample is None:
            host_sample.gpus.append(gpu_sample := GpuSample(uuid=name))
        if gpu_sample.lost or any(isinstance(value, str) and "is lost" in value.lower() for value in values.values()):
            host_sample.gpus[host_sample.gpus.index(gpu_sample)] = gpu_sample = GpuSample(uuid=name, lost=True)
            return gpu_sample
        for column_name, value in values.items():
            if (column := columns.get(column_name)) is not None and column.field == "throttled":
                with contextlib.suppress(ValueError):
                    gpu_sample.throttled = _parse_throttle_reasons(str(value))
            elif column is not None:
                set_record_field(gpu_sample, column.field, parse_number(value, column.default_scale))
        return gpu_sample

    def add_nic(
        self, wall_s: float, interface_name: str, values: Mapping[str, object], columns: Mapping[str, LogColumn], kind: str
    ) -> None:
        """Add the counters of a network interface at a moment. A rate is added up over the time since the moment before, which
        gives a counter that begins with 0 at the first moment."""
        nic_sample = NicSample(name=interface_name, kind=kind)
        for column_name, value in values.items():
            column = columns.get(column_name)
            counter_value = parse_number(value, column.default_scale) if column is not None else None
            if column is None or counter_value is None:
                continue
            if column.is_rate:
                last_wall_s, last_count = self._last_counts.get((self.host, interface_name, column.field), (wall_s, 0.0))
                counter_value = last_count + counter_value * max(wall_s - last_wall_s, 0.0)
                self._last_counts[self.host, interface_name, column.field] = (wall_s, counter_value)
            set_record_field(nic_sample, column.field, counter_value)
        host_sample = self.find_or_add_sample(wall_s)
        host_sample.nics = [*(host_sample.nics or []), nic_sample]

    def add_host(self, wall_s: float, values: Mapping[str, object], columns: Mapping[str, LogColumn]) -> None:
        """Add values of the host at a moment. The busy share of the processors is what they were neither idle nor waiting."""
        host_sample, idle_pct, iowait_pct = self.find_or_add_sample(wall_s), None, 0.0
        for column_name, value in values.items():
            column = columns.get(column_name)
            parsed_number = parse_number(value, column.default_scale) if column is not None else None
            if column is None or parsed_number is None:
                continue
            if column.field == "idle_pct":
                idle_pct = parsed_number
            elif column.field == "iowait_pct":
                iowait_pct = parsed_number
            else:
                set_record_field(host_sample, column.field, parsed_number)
        if idle_pct is not None:
            host_sample.cpu_pct = min(max(100 - idle_pct - iowait_pct, 0.0), 100.0)

    def add_step(self, values: Mapping[str, object], columns: Mapping[str, LogColumn], time: object, **options: Any) -> bool:
        """Add a step. Returns False, and counts the line as not read, if the values have no number of a step.

        options: as for `parse_number`."""
        step_row = StepRow(wall_s=self.clock.read_time(time))
        for column_name, value in values.items():
            if (column := columns.get(column_name)) is not None and getattr(step_row, column.field) is None:
                setattr(step_row, column.field, parse_number(value, column.default_scale, **options))
        if step_row.step is None or step_row.step < 0 or step_row.step % 1:
            self.unread_count += 1
            return False
        self.steps.append(step_row)
        return True


def set_record_field(record: Any, field_name: str, field_value: float | None) -> None:
    """Set a field of a record if the number is allowed there: a count must not be negative, and is a whole number."""
    if field_value is None:
        return
    if "Count" in str(type(record).__annotations__[field_name]):
        if not 0 <= field_value <= LARGEST_INTEGER:
            return
        field_value = int(field_value)
    setattr(record, field_name, field_value)


def build_steps(step_rows: list[StepRow], gpu_count: int) -> tuple[dict[int, list[StepRecord]], str]:
    """The step records of each rank, and the unit of their data. gpu_count: the number of GPUs of the run.

    The ranks are numbered from 0 without gaps. If a step occurs several times, as after a restart, the last counts. A step
    without a time of its own gets the mean time since the step before in the log. A step whose time is not known counts only
    with its loss (`watched`).
    """
    rows_by_rank: dict[float, dict[int, StepRow]] = {}
    for row in step_rows:
        rows_by_rank.setdefault(row.rank or 0, {})[int(row.step or 0)] = row
    data_units = ("tokens", "samples")
    unit = next((unit for unit in data_units if any(_count_units(row, unit, 1.0, gpu_count) for row in step_rows)), STEP_UNIT)
    records_by_rank = {}
    for rank, (_, row_by_step) in enumerate(sorted(rows_by_rank.items())):
        ordered_steps = sorted(row_by_step.items())
        step_times_ms = _find_step_times_ms(ordered_steps)
        last_wall_s, rank_records = 0.0, []
        for (step, row), step_ms in zip(ordered_steps, step_times_ms, strict=True):
            last_wall_s = row.wall_s if row.wall_s is not None else last_wall_s
            unit_count = 1 if unit == STEP_UNIT else max(_count_units(row, unit, step_ms, gpu_count) or 0, 0)
            step_record = StepRecord(
                schema=SCHEMA, step=step, t_s=min(last_wall_s, 3e9), wall_s=last_wall_s, units=round(unit_count or 1),
                step_ms=step_ms or 0.0, loss=row.loss, watched=step_ms is None or not unit_count,
            )  # fmt: skip
            for field_name in ("allocated_bytes", "reserved_bytes"):
                set_record_field(step_record, field_name, getattr(row, field_name))
            rank_records.append(step_record)
        records_by_rank[rank] = rank_records
    return records_by_rank, unit


def _count_units(step_row: StepRow, data_unit: str, step_ms: float | None, gpu_count: int) -> float | None:
    """The units of data of a step, which follow from the rate and the time if the log has no count."""
    if (logged_count := getattr(step_row, data_unit)) is not None:
        return float(logged_count)
    units_per_s = getattr(step_row, f"{data_unit}_per_s")
    if units_per_s is None and data_unit == "tokens" and step_row.device_tokens_per_s is not None:
        units_per_s = step_row.device_tokens_per_s * gpu_count
    return None if units_per_s is None or step_ms is None else units_per_s * step_ms / 1000


def _find_step_times_ms(ordered_steps: list[tuple[int, StepRow]]) -> list[float | None]:
    """The time of each step in ms; None if it is not known. ordered_steps: (number of a step, its row), sorted by number."""
    derived: list[float | None] = [None]
    for (step, row), (next_step, next_row) in itertools.pairwise(ordered_steps):
        has_times = row.wall_s is not None and next_row.wall_s is not None
        distance_s = (next_row.wall_s or 0.0) - (row.wall_s or 0.0)
        derived.append(1000 * distance_s / (next_step - step) if has_times and distance_s > 0 else None)
    # A time whose unit the log does not name is in the unit that agrees with the times of the lines.
    pairs = [(row.step_time, time) for (_, row), time in zip(ordered_steps, derived, strict=True) if row.step_time and time]
    unit_ms = next(
        (
            scale
            for scale in (1000.0, 1.0)
            if pairs
            and sum(1 / DERIVED_TOLERANCE < value * scale / time < DERIVED_TOLERANCE for value, time in pairs) * 2 > len(pairs)
        ),
        None,
    )
    step_times_ms = []
    for (_, row), time in zip(ordered_steps, derived, strict=True):
        logged_ms = row.step_time * unit_ms if row.step_time and unit_ms else time
        step_ms = row.step_ms if row.step_ms is not None else logged_ms
        step_times_ms.append(step_ms if step_ms is not None and 0 < step_ms < 3e12 else None)
    return step_times_ms
