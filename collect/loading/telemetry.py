"""Computes how much of a run its telemetry covers: a mean over samples is only useful if samples cover the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import polars as pl

from collect.sources.samples import Samples, select_real_gpus
from collect.sources.steps import find_timed_window
from shardlab.record_types import ClockOffset

MOST_CLOCK_OFFSET_S = 0.1  # seconds by which the clocks of two hosts may differ: a fifth of the usual time between two samples
LEAST_CLOCK_JUMP_S = 0.1  # a clock that jumps by more seconds was set; time daemons adjust a clock gradually, in smaller steps
LEAST_GAP_PERIODS = 2.0  # if two samples are further apart than this many times the usual distance, there is a gap between them
# The sampler writes its last sample early, and a short run has few samples. So the usual distance of 0.5 s, with some jitter,
# is never a gap.
LEAST_GAP_S = 0.6


class Coverage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How much of a run the telemetry of one host covers, and how reliable the telemetry is.

    coverage_pct and largest_gap_s are absent if no steps were timed. The three clock offsets are absent if the run was on one
    host.
    """

    run: str
    host: str
    samples: int
    """Number of samples."""
    coverage_pct: float | None = None
    """Share of the timed window that lies between samples without a gap."""
    largest_gap_s: float | None = None
    """The longest part of the timed window without a sample."""
    rate_kept_pct: float | None = None
    """Samples in the timed window, in percent of the requested number; absent if not known."""
    clock_step_s: float | None = None
    """Seconds by which the clock was set while sampling, negative: back; absent: not set."""
    clock_start_s: float | None = None
    """Clock of this host minus clock of rank 0's host at the start of the run, in seconds."""
    clock_end_s: float | None = None
    """Clock of this host minus clock of rank 0's host at the end of the run, in seconds."""
    clock_within_s: float | None = None
    """The largest error of clock_start_s and clock_end_s, in seconds."""
    sampler_ends: int = 0
    """How often the sampler ended while the run was still going on."""
    lost_gpus: list[str] = []
    """UUIDs of GPUs that the driver could no longer reach."""
    unknown_ports: list[str] = []
    """RDMA ports, as DEVICE/PORT, without any counter that the sampler knows, so that their traffic is not measured."""
    incomplete: str = ""
    """Why the samples do not cover the whole timed window, e.g. if the sampler was killed; '' if they do."""

    @property
    def trouble(self) -> str:
        """Problems of this host's telemetry, as clauses; '' if there are none. The problem in `incomplete` is not repeated
        here."""
        clauses = []
        if self.sampler_ends:
            clauses.append(f"its sampler ended {self.sampler_ends} time{'s' * (self.sampler_ends > 1)} while the run went on")
        if self.clock_step_s is not None:
            step_direction = "back" if self.clock_step_s < 0 else "forward"
            clauses.append(f"its clock was set {step_direction} by {abs(self.clock_step_s):.1f} s")
        largest_offset_s = max(abs(self.clock_start_s or 0.0), abs(self.clock_end_s or 0.0))
        if largest_offset_s - (self.clock_within_s or 0.0) > MOST_CLOCK_OFFSET_S:
            clauses.append(f"its clock was {largest_offset_s:.2f} s from the clock of rank 0's host")
        if self.lost_gpus:
            clauses.append(f"GPUs were lost: {', '.join(self.lost_gpus)}")
        if self.unknown_ports:
            clauses.append(f"traffic of RDMA ports without known counters is not measured: {', '.join(self.unknown_ports)}")
        return "; ".join(clauses)


def compute_coverage(
    run_id: str,
    timed_steps: pl.DataFrame,
    samples: Samples,
    run_hosts: Iterable[str],
    sampler_ends_by_host: Mapping[str, int],
    offsets_by_host: Mapping[str, Mapping[str, ClockOffset]],
    clock_step_by_host: Mapping[str, float],
) -> list[Coverage]:
    """The coverage of a run: one entry for each host that wrote samples or on which ranks ran.

    timed_steps: one row per step and rank. run_hosts: the hosts on which ranks ran. sampler_ends_by_host, offsets_by_host: by
    host, as in `RunRecords`. clock_step_by_host: the result of `find_clock_steps`."""
    timed_window = find_timed_window(timed_steps)
    coverages = []
    times_by_host = {host: np.empty(0) for host in run_hosts}
    for (host,), host_rows in samples.hosts.select("host", "wall_s").group_by("host", maintain_order=True):
        times_by_host[str(host)] = host_rows["wall_s"].to_numpy()
    hz_by_host = dict(samples.hosts.filter(pl.col("started_hz") > 0).select("host", "started_hz").rows())
    lost_samples = select_real_gpus(samples.gpus).filter("lost")
    lost_gpus = [] if lost_samples.is_empty() else lost_samples.select("host", "uuid").unique(maintain_order=True).rows()
    unknown_ports = _find_unknown_ports(samples.rdma)
    for host, sample_times in times_by_host.items():
        coverage = Coverage(run=run_id, host=host, samples=len(sample_times), sampler_ends=sampler_ends_by_host.get(host, 0))
        host_offsets = offsets_by_host.get(host, {})
        coverage.clock_start_s, coverage.clock_end_s = (
            host_offsets[side_of_run].offset_s if side_of_run in host_offsets else None for side_of_run in ("start", "end")
        )
        coverage.clock_within_s = max((clock_offset.within_s for clock_offset in host_offsets.values()), default=None)
        coverage.clock_step_s = clock_step_by_host.get(host)
        coverage.lost_gpus = [uuid for lost_host, uuid in lost_gpus if lost_host == host]
        coverage.unknown_ports = [port for port_host, port in unknown_ports if port_host == host]
        if timed_window is not None:
            coverage.coverage_pct, coverage.largest_gap_s = measure_coverage(sample_times, timed_window)
            coverage.incomplete = _explain_missing_samples(sample_times, timed_window)
            if (hz := hz_by_host.get(host)) and (expected_count := (timed_window[1] - timed_window[0]) * hz) >= 1:
                coverage.rate_kept_pct = min(
                    100 * int(((timed_window[0] <= sample_times) & (sample_times <= timed_window[1])).sum()) / expected_count,
                    100.0,
                )
        coverages.append(coverage)
    return coverages


def find_clock_steps(host_samples: pl.DataFrame) -> dict[str, float]:
    """Find the hosts whose wall clock was set. Returns {host: by how many seconds the clock was set}.

    host_samples: the samples of the hosts. A wall clock was set if the difference between the wall clock and the monotonic
    clock changes. The difference must be stable for two samples before and two samples after the change; otherwise a delay
    between reading the two clocks would look like a change."""
    step_s_by_host: dict[str, float] = {}
    all_ahead_s = host_samples["wall_s"].to_numpy() - host_samples["t_s"].to_numpy()
    # Nearly all runs on one host return here: both clocks of the host kept the same distance, so no clock was set.
    if not len(all_ahead_s) or all_ahead_s.max() - all_ahead_s.min() <= LEAST_CLOCK_JUMP_S:
        return step_s_by_host
    clock_rows = host_samples.with_columns(ahead_s=pl.col("wall_s") - pl.col("t_s"))
    spread_s = pl.col("ahead_s").max() - pl.col("ahead_s").min()
    stepped_rows = clock_rows.filter(spread_s.over("host", "boot_id") > LEAST_CLOCK_JUMP_S).sort("host", "boot_id", "t_s")
    for (host, _), boot_rows in stepped_rows.group_by("host", "boot_id", maintain_order=True):
        ahead_s = boot_rows["ahead_s"].to_list()
        for earlier_s, before_step_s, after_step_s, later_s in zip(ahead_s, ahead_s[1:], ahead_s[2:], ahead_s[3:]):
            forward_s = min(after_step_s, later_s) - max(earlier_s, before_step_s)
            backward_s = max(after_step_s, later_s) - min(earlier_s, before_step_s)

            if forward_s > LEAST_CLOCK_JUMP_S or backward_s < -LEAST_CLOCK_JUMP_S:
                step_s_by_host[str(host)] = step_s_by_host.get(str(host), 0.0) + after_step_s - before_step_s
    return step_s_by_host


def _find_unknown_ports(rdma: pl.DataFrame) -> list[tuple[str, str]]:
    """The RDMA ports that never had the value of any counter, as (host, DEVICE/PORT)."""
    if rdma.is_empty():
        return []
    value_columns = [name for name in rdma.columns if name not in ("host", "boot_id", "wall_s", "device", "port", "link_layer")]
    has_value = pl.any_horizontal(pl.col(value_columns).is_not_null()).any()
    ports = rdma.group_by("host", "device", "port").agg(known=has_value).filter(~pl.col("known")).sort("host", "device", "port")
    return [(host, f"{device}/{port}") for host, device, port, _ in ports.rows()]


def _explain_missing_samples(sample_times_s: np.ndarray, timed_window: tuple[float, float]) -> str:
    """The reason why the samples of a host do not reach from the start to the end of the timed window; '' if they do.

    sample_times_s: the times of the samples, in ascending order.
    """
    if len(sample_times_s) < 2:
        return "one sample" if len(sample_times_s) else "no samples"
    longest_covered_s = _compute_longest_covered_s(np.diff(sample_times_s))
    if (missing_s := timed_window[1] - sample_times_s[-1]) > longest_covered_s:
        return f"no samples in the last {missing_s:.1f} s"
    if (missing_s := sample_times_s[0] - timed_window[0]) > longest_covered_s:
        return f"no samples in the first {missing_s:.1f} s"
    return ""


def _compute_longest_covered_s(distances_s: np.ndarray) -> float:
    """The longest distance between two samples that is not a gap, in seconds."""
    return max(LEAST_GAP_PERIODS * _find_median_distance(distances_s), LEAST_GAP_S)


def _find_median_distance(distances_s: np.ndarray) -> float:
    """The median of `distances_s`, or the smaller middle value if their number is even."""
    middle_index = (len(distances_s) - 1) // 2
    return float(np.partition(distances_s, middle_index)[middle_index])


def measure_coverage(sample_times_s: Sequence[float] | np.ndarray, timed_window: tuple[float, float]) -> tuple[float, float]:
    """Returns (percent of the span that the samples cover, longest time without a sample within the span, in seconds).

    sample_times_s: the times of the samples in seconds, in ascending order. The time between two samples is covered if their
    distance is at most LEAST_GAP_PERIODS times the median distance, or at most LEAST_GAP_S. With fewer than two samples,
    nothing is covered."""
    start, end = timed_window
    times_array = np.asarray(sample_times_s, float)
    longest_gap_s = float(
        np.diff(np.concatenate(([start], times_array[(start < times_array) & (times_array < end)], [end]))).max()
    )
    return compute_covered_pct(times_array, timed_window), longest_gap_s


def compute_covered_pct(sample_times_s: np.ndarray, timed_window: tuple[float, float]) -> float:
    """The percent of the span that the samples cover (`measure_coverage`)."""
    start, end = timed_window
    distances_s = np.diff(sample_times_s)
    if not len(distances_s):
        return 0.0
    covered_s = np.minimum(sample_times_s[1:], end) - np.maximum(sample_times_s[:-1], start)
    return (
        100 * float(covered_s[(covered_s > 0) & (distances_s <= _compute_longest_covered_s(distances_s))].sum()) / (end - start)
    )
