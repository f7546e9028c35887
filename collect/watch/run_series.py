"""Builds the curves of one run (loss, step times, telemetry) from the records that ranks and samplers have written so far."""

from __future__ import annotations

from collections.abc import Sequence

from collect.sources.followed_records import FollowedRecords, list_sampled_hosts
from collect.sources.network_rate import NetworkRate
from collect.sources.world_steps import WorldSteps
from collect.watch.curve import LiveCurve
from shardlab.files import files
from shardlab.runs import suspension
from shardlab.runs.progress import RunProgress
from shardlab.runs.record import Sample, StepRecord
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.runs.suspension import SuspendedSpan
from shardlab.terminal.notation import GIB, MB

LOSS, STEP_TIME = "Loss", "Step time (ms)"
GPU_BUSY, GPU_MEMORY, GPU_POWER = "GPU busy (%)", "GPU memory in use (GiB)", "GPU power (W)"
CPU_BUSY, HOST_MEMORY, NETWORK_SENT = "Processors busy (%)", "Memory of the hosts in use (%)", "Sent on the network (MB/s)"
STEP_FIGURES = (LOSS, STEP_TIME)
TIME_FIGURES = (GPU_BUSY, GPU_MEMORY, GPU_POWER, CPU_BUSY, HOST_MEMORY, NETWORK_SENT)
MOST_LINES = 16  # the most lines in a figure
_UUID_CHARACTERS = 12  # shown characters of the UUID of a GPU, such as GPU-5c3f9a21: enough to distinguish GPUs of a host


class RunSeries:
    """The curves of a run. They grow when new records are read.

    began_s: when the run was started, in seconds since the epoch. pauses: the suspensions of the run that are known.

    curves: {title of a figure: {name of a line: its curve}}. left_out: the lines for which a figure has no room.
    """

    def __init__(self, run_dir: RunDir, run: Run, began_s: float, suspensions: Sequence[SuspendedSpan]) -> None:
        self.folder, self.run, self.began_s, self.suspensions = run_dir, run, began_s, list(suspensions)
        self._reset()

    def _reset(self) -> None:
        self.progress = RunProgress()
        self.last_record_s = 0.0  # the time of the last record, in seconds since the epoch by the clock of its node
        self.left_out: dict[str, set[str]] = {}  # title of a figure -> the lines for which the figure has no room
        self.curves: dict[str, dict[str, LiveCurve]] = {title: {} for title in (*STEP_FIGURES, *TIME_FIGURES)}
        self._rank_files = [
            FollowedRecords(str(self.folder.steps_file(rank)), StepRecord) for rank in range(self.run.cell.gpus)
        ]
        self._sample_file_by_host: dict[str, FollowedRecords[Sample]] = {}
        self._world_steps = WorldSteps(self.run.cell.gpus)
        self._sent_rate_by_host: dict[str, NetworkRate] = {}

    def read_new_records(self) -> bool:
        """Read the records that were appended since the last call. Returns whether there were any new records."""
        has_changed = False
        while (has_new_records := self._read_next_records()) is not False:
            has_changed = True
            if has_new_records is None:  # a file was replaced, for example because the run resumed from a checkpoint
                self._reset()
        return has_changed

    def _read_next_records(self) -> bool | None:
        """Read the next records of each file. Every file is read in turn, so that no rank gets far ahead of another rank.

        Returns whether there were any new records; None if a file was replaced.
        """
        has_changed = False
        if files.is_folder(f"{self.folder.path}/steps"):
            for rank, rank_file in enumerate(self._rank_files):
                step_records = rank_file.read_new()
                if step_records is None:
                    return None
                has_changed |= bool(step_records)
                self._add_steps(rank, step_records)
        for host in list_sampled_hosts(self.folder):
            host_samples = self._sample_file_by_host.setdefault(
                host, FollowedRecords(str(self.folder.samples_file(host)), Sample)
            ).read_new()
            if host_samples is None:
                return None
            has_changed |= bool(host_samples)
            for sample in host_samples:
                self._add_sample(host, sample)
        return has_changed

    def _add_steps(self, rank: int, step_records: Sequence[StepRecord]) -> None:
        step_records = suspension.mark_suspended(step_records, self.suspensions)
        if rank == 0:
            self.progress.add_records(step_records)
        self.last_record_s = max([self.last_record_s, *(record.wall_s for record in step_records)])
        for world_step in self._world_steps.add(step_records):
            if world_step.loss is not None:
                self._add_value(LOSS, "", world_step.step_number, world_step.loss)
            if not world_step.watched:
                self._add_value(STEP_TIME, "", world_step.step_number, world_step.step_ms)

    def _add_sample(self, host: str, sample: Sample) -> None:
        self.last_record_s = max(self.last_record_s, sample.wall_s)
        since_start_s = sample.wall_s - self.began_s
        self._add_value(CPU_BUSY, host, since_start_s, sample.cpu_pct)
        if sample.memory_used_bytes is not None and sample.memory_total_bytes:
            self._add_value(HOST_MEMORY, host, since_start_s, 100 * sample.memory_used_bytes / sample.memory_total_bytes)
        sent_per_s = self._sent_rate_by_host.setdefault(host, NetworkRate("tx_bytes")).compute_rate(sample)
        self._add_value(NETWORK_SENT, host, since_start_s, sent_per_s / MB if sent_per_s is not None else None)
        for gpu in sample.gpus or ():
            line_name = f"{host} {gpu.uuid[:_UUID_CHARACTERS]}{' (played)' * gpu.played}"
            self._add_value(GPU_BUSY, line_name, since_start_s, gpu.utilization_pct)
            self._add_value(
                GPU_MEMORY, line_name, since_start_s, gpu.memory_used_bytes / GIB if gpu.memory_used_bytes is not None else None
            )
            self._add_value(GPU_POWER, line_name, since_start_s, gpu.power_w)

    def _add_value(self, figure_title: str, line_name: str, x: float, value: float | None) -> None:
        """Add a value to a line of a figure. figure_title: the title of the figure. value: None if it is not known; then
        nothing is added."""
        if value is None:
            return
        curve_by_line = self.curves[figure_title]
        if line_name not in curve_by_line:
            if len(curve_by_line) >= MOST_LINES:
                self.left_out.setdefault(figure_title, set()).add(line_name)
                return
            curve_by_line[line_name] = LiveCurve()
        curve_by_line[line_name].add(x, value)
