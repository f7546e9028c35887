"""Computes how much of a run its telemetry covers: a mean over samples is only useful if samples cover the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import polars as pl

from collect.sources.samples import Samples, select_real_gpus
from collect.sources.steps import find_timed_window
from shardlab.record_types import ClockOffset

MOST_APART_S = 0.1  # seconds by which the clocks of two hosts may differ: a fifth of the usual time between two samples
JUMP_S = 0.1  # a clock that jumps by more seconds than this was set; time daemons adjust a clock gradually, in smaller steps
GAP_PERIODS = 2.0  # if two samples are further apart than this many times the usual distance, there is a gap between them
# The sampler writes its last sample early, and a short run has few samples. So the usual distance of 0.5 s, with some jitter,
# is never a gap.
NEVER_A_GAP_S = 0.6


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
            clauses.append(
                f"its clock was set {'back' if self.clock_step_s < 0 else 'forward'} by {abs(self.clock_step_s):.1f} s"
            )
        apart_s = max((abs(offset) for offset in (self.clock_start_s, self.clock_end_s) if offset is not None), default=0.0)
        if apart_s - (self.clock_within_s or 0.0) > MOST_APART_S:
            clauses.append(f"its clock was {apart_s:.2f} s from the clock of rank 0's host")
        if self.lost_gpus:
            clauses.append(f"GPUs were lost: {', '.join(self.lost_gpus)}")
        return "; ".join(clauses)


def compute_coverage(
    run_id: str,
    timed_steps: pl.DataFrame,
    samples: Samples,
    ran_on: Iterable[str],
    sampler_ends: Mapping[str, int],
    clocks: Mapping[str, Mapping[str, ClockOffset]],
    clock_jumps: Mapping[str, float],
) -> list[Coverage]:
    """The coverage of a run: one entry for each host that wrote samples or on which ranks ran.

    timed_steps: the timed steps, one row per step and rank. ran_on: the names of the hosts on which ranks ran. sampler_ends,
    clocks: by host, as in `RunRecords`. clock_jumps: the result of `find_clock_steps`.
    """
    span = find_timed_window(timed_steps)
    entries = []
    hosts = {host: np.empty(0) for host in ran_on}
    for (host,), rows in samples.hosts.select("host", "wall_s").group_by("host", maintain_order=True):
        hosts[str(host)] = rows["wall_s"].to_numpy()
    hz_of = dict(samples.hosts.filter(pl.col("started_hz") > 0).select("host", "started_hz").rows())
    lost_samples = select_real_gpus(samples.gpus).filter("lost")
    lost_gpus = [] if lost_samples.is_empty() else lost_samples.select("host", "uuid").unique(maintain_order=True).rows()
    for host, times in hosts.items():
        entry = Coverage(run=run_id, host=host, samples=len(times), sampler_ends=sampler_ends.get(host, 0))
        host_clocks = clocks.get(host, {})
        entry.clock_start_s, entry.clock_end_s = (
            host_clocks[when].offset_s if when in host_clocks else None for when in ("start", "end")
        )
        entry.clock_within_s = max((clock.within_s for clock in host_clocks.values()), default=None)
        entry.clock_step_s = clock_jumps.get(host)
        entry.lost_gpus = [uuid for lost_on, uuid in lost_gpus if lost_on == host]
        if span is not None:
            entry.coverage_pct, entry.largest_gap_s = measure_coverage(times, span)
            entry.incomplete = _explain_incomplete(times, span)
            if (hz := hz_of.get(host)) and (expected_count := (span[1] - span[0]) * hz) >= 1:
                entry.rate_kept_pct = min(100 * int(((span[0] <= times) & (times <= span[1])).sum()) / expected_count, 100.0)
        entries.append(entry)
    return entries


def find_clock_steps(hosts: pl.DataFrame) -> dict[str, float]:
    """Find the hosts whose wall clock was set. Returns {host: by how many seconds the clock was set}.

    hosts: the samples of the hosts. A wall clock was set if the difference between the wall clock and the monotonic clock
    changes. The difference must be stable for two samples before and two samples after the change; otherwise a delay between
    reading the two clocks would look like a change.
    """
    step_of_host: dict[str, float] = {}
    seconds_ahead = hosts["wall_s"].to_numpy() - hosts["t_s"].to_numpy()
    # Nearly all runs on one host return here: both clocks of the host kept the same distance, so no clock was set.
    if not len(seconds_ahead) or seconds_ahead.max() - seconds_ahead.min() <= JUMP_S:
        return step_of_host
    clock_rows = hosts.with_columns(ahead_s=pl.col("wall_s") - pl.col("t_s"))
    spread = pl.col("ahead_s").max() - pl.col("ahead_s").min()
    stepped = clock_rows.filter(spread.over("host", "boot_id") > JUMP_S).sort("host", "boot_id", "t_s")
    for (host, _), rows in stepped.group_by("host", "boot_id", maintain_order=True):
        seconds = rows["ahead_s"].to_list()
        for before, old, new, after in zip(seconds, seconds[1:], seconds[2:], seconds[3:]):
            forward, back = min(new, after) - max(before, old), max(new, after) - min(before, old)
            if forward > JUMP_S or back < -JUMP_S:
                step_of_host[str(host)] = step_of_host.get(str(host), 0.0) + new - old
    return step_of_host


def _explain_incomplete(times: np.ndarray, span: tuple[float, float]) -> str:
    """The reason why the samples of a host do not reach from the start to the end of the timed window; '' if they do.

    times: the times of the samples, in ascending order. span: start and end of the timed window.
    """
    if len(times) < 2:
        return "one sample" if len(times) else "no samples"
    longest = _longest_distance(np.diff(times))
    if (missing_s := span[1] - times[-1]) > longest:
        return f"no samples in the last {missing_s:.1f} s"
    if (missing_s := times[0] - span[0]) > longest:
        return f"no samples in the first {missing_s:.1f} s"
    return ""


def _longest_distance(distances: np.ndarray) -> float:
    """The longest distance between two samples that is not a gap, in seconds. distances: the distances."""
    return max(GAP_PERIODS * _usual_distance(distances), NEVER_A_GAP_S)


def _usual_distance(distances: np.ndarray) -> float:
    """The usual distance between two samples: the median of `distances`, or the smaller middle value if the number is even."""
    middle = (len(distances) - 1) // 2
    return float(np.partition(distances, middle)[middle])


def measure_coverage(times: Sequence[float] | np.ndarray, span: tuple[float, float]) -> tuple[float, float]:
    """Returns (percent of the span that the samples cover, longest time without a sample within the span, in seconds).

    times: the times of the samples in seconds, in ascending order. The time between two samples is covered if their distance is
    at most GAP_PERIODS times the median distance, or at most NEVER_A_GAP_S. With fewer than two samples, nothing is covered.
    """
    start, end = span
    moments = np.asarray(times, float)
    longest = float(np.diff(np.concatenate(([start], moments[(start < moments) & (moments < end)], [end]))).max())
    return covered_pct(moments, span), longest


def covered_pct(times: np.ndarray, span: tuple[float, float]) -> float:
    """The percent of the span that the samples cover (`measure_coverage`)."""
    start, end = span
    distances = np.diff(times)
    if not len(distances):
        return 0.0
    covered_s = np.minimum(times[1:], end) - np.maximum(times[:-1], start)
    return 100 * float(covered_s[(covered_s > 0) & (distances <= _longest_distance(distances))].sum()) / (end - start)
