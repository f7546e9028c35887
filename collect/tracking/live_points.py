"""Computes the points that a tracker gets while a run is still going on: values of steps and validations, as in
`collect.tracked_run`, and system metrics."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from statistics import fmean

from collect.sources.followed_records import FollowedRecords, list_sampled_hosts
from collect.sources.network_rate import NetworkRate
from collect.sources.world_steps import WorldStep, WorldSteps
from collect.tracked_run import TrackedStep
from shardlab.files import files
from shardlab.runs import suspension
from shardlab.runs.record import Sample, StepRecord, ValidationRecord
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.terminal import printable

SYSTEM_PERIOD_S = 2.0  # length in seconds of the periods over which system metrics are averaged
GPU_FIELDS = ("utilization_pct", "memory_used_bytes", "power_w", "temperature_c", "sm_clock_mhz")


class LivePoints:
    """Reads the records of a run while its files grow, and turns them into points for a tracker."""

    def __init__(self, run_dir: RunDir, run: Run) -> None:
        self._folder = run_dir
        self._data_share = run.cell.data_ranks / run.cell.gpus  # ranks that share a model record the same units
        self._rank_files = [FollowedRecords(str(run_dir.steps_file(rank)), StepRecord) for rank in range(run.cell.gpus)]
        self._validation_file = FollowedRecords(str(run_dir.validation_file), ValidationRecord)
        self._sample_file_by_host: dict[str, FollowedRecords[Sample]] = {}
        self._world_steps = WorldSteps(run.cell.gpus)
        self._rates_by_host: dict[str, tuple[NetworkRate, NetworkRate]] = {}
        self._step_numbers: list[int] = []  # the numbers of the steps that every rank has recorded
        self._step_ends_s: list[float] = []  # the end of each of these steps, in seconds since the epoch

    def read_new_points(self) -> list[TrackedStep] | None:
        """The points since the last call, ordered by step. No point is of an earlier step than the points of earlier calls.

        Returns None if records were replaced, for example because the run resumes from a checkpoint. All earlier points are
        then no longer valid.
        """
        last_step = self._step_numbers[-1] if self._step_numbers else 0
        points: list[TrackedStep] = []
        samples_by_host: dict[str, list[Sample]] = {}
        suspensions = suspension.read_suspensions(self._folder.read_events())
        has_new_records = True
        while has_new_records:
            has_new_records = False
            for rank_file in self._rank_files if files.is_folder(f"{self._folder.path}/steps") else ():
                if (steps := rank_file.read_new()) is None:
                    return None
                has_new_records |= bool(steps)
                points += map(self._build_step_point, self._world_steps.add(suspension.mark_suspended(steps, suspensions)))
            for host in list_sampled_hosts(self._folder):
                host_file = self._sample_file_by_host.setdefault(
                    host, FollowedRecords(str(self._folder.samples_file(host)), Sample)
                )
                if (new_samples := host_file.read_new()) is None:
                    return None
                has_new_records |= bool(new_samples)
                samples_by_host.setdefault(host, []).extend(new_samples)
        # Validations are read last. A validation is written before the record of the next step, so no validation is missing
        # here that belongs before the last of the steps that were read.
        if (validations := self._validation_file.read_new()) is None:
            return None
        points += filter(None, map(self._build_validation_point, validations))
        points += self._build_system_points(samples_by_host, last_step)
        return sorted(points, key=lambda point: point.step)

    def _build_step_point(self, step: WorldStep) -> TrackedStep:
        """The point of a step. If an instrument slowed down the step, the point contains the loss, but no times."""
        self._step_numbers.append(step.step_number)
        self._step_ends_s.append(step.wall_s)
        value_by_name = {} if step.loss is None else {"loss": step.loss}
        if not step.watched:
            throughput_per_s = 1000 * step.units * self._data_share / step.step_ms
            value_by_name |= {"step_ms": step.step_ms, "throughput_per_s": throughput_per_s}
        return TrackedStep(step.step_number, step.wall_s, value_by_name)

    def _build_validation_point(self, record: ValidationRecord) -> TrackedStep | None:
        """The point of a validation, at the end of the step after which the validation ran; None if this step is not known."""
        step_index = bisect_left(self._step_numbers, record.step)
        if step_index == len(self._step_numbers) or self._step_numbers[step_index] != record.step:
            return None
        value_by_name = {"validation_loss": record.loss, "validation_accuracy_pct": 100 * record.accuracy}
        return TrackedStep(record.step, self._step_ends_s[step_index], value_by_name)

    def _build_system_points(self, samples_by_host: dict[str, list[Sample]], min_step: int) -> Iterator[TrackedStep]:
        """Points with the means of system metrics, one for each period of SYSTEM_PERIOD_S seconds.

        The point of a period gets the number of the last step that ended before the end of the period; 0 if no step had ended.
        """
        values_by_period: dict[int, dict[str, list[float]]] = {}
        last_sample_s: dict[int, float] = {}
        for host, host_samples in samples_by_host.items():
            for sample in host_samples:
                period = int(sample.wall_s // SYSTEM_PERIOD_S)
                last_sample_s[period] = max(last_sample_s.get(period, 0.0), sample.wall_s)
                for name, metric_value in self._list_system_values(host, sample):
                    values_by_period.setdefault(period, {}).setdefault(name, []).append(metric_value)
        for period, values_by_metric in sorted(values_by_period.items()):
            step_index = bisect_right(self._step_ends_s, last_sample_s[period])
            step = max(self._step_numbers[step_index - 1] if step_index else 0, min_step)
            yield TrackedStep(
                step, last_sample_s[period], {name: fmean(metric_values) for name, metric_values in values_by_metric.items()}
            )

    def _list_system_values(self, host: str, sample: Sample) -> Iterable[tuple[str, float]]:
        """(name of a metric, value) for each known value in a sample of a host."""
        sent_rate, received_rate = self._rates_by_host.setdefault(host, (NetworkRate("tx_bytes"), NetworkRate("rx_bytes")))
        value_by_metric = {
            "cpu_pct": sample.cpu_pct,
            "memory_used_bytes": sample.memory_used_bytes,
            "network_sent_bytes_per_s": sent_rate.compute_rate(sample),
            "network_received_bytes_per_s": received_rate.compute_rate(sample),
        }
        for gpu in (gpu for gpu in sample.gpus or () if not gpu.played):
            value_by_metric |= {f"{gpu.uuid}/{metric_name}": getattr(gpu, metric_name) for metric_name in GPU_FIELDS}
        return (
            (printable.clean_to_one_line(f"system/{host}/{metric_name}"), float(metric_value))
            for metric_name, metric_value in value_by_metric.items()
            if metric_value is not None
        )
