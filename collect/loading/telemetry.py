"""How much of a run its telemetry saw: a mean over samples is worth what the samples cover."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import msgspec
import polars as pl

from collect.sources.samples import Samples
from collect.sources.steps import window
from shardlab.record import ClockOffset

APART_S = 0.1  # by which the clocks of two hosts may differ: a fifth of the distance of two samples
STEP_S = 0.1  # by which a clock is set at least; daemons that keep the time speed it up or slow it down by less
GAP_PERIODS = 2.0  # between samples further apart than this many usual distances, the host was not watched


class Coverage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One host in one run.

    coverage_pct: share of the timed window between samples that are no gap apart; absent where no steps were timed.
    largest_gap_s: the longest part of the timed window without a sample; absent where no steps were timed.
    rate_kept_pct: samples in the timed window over those that were asked for; absent if the records do not say the rate.
    clock_step_s: how far the clock of the host was set while it was sampled, backwards if negative; absent if it was not.
    clock_start_s, clock_end_s: clock of the host minus clock of rank 0's host, at the start and the end of the run, in seconds;
    the true differences are within clock_within_s. Absent if the run was on one host.
    sampler_ends: how often the sampler ended while the run went on.
    lost_gpus: UUIDs of GPUs that the driver did not reach any more.
    incomplete: why the samples are not of the whole timed window, as where the sampler was killed; empty if they are.
    """

    run: str
    host: str
    samples: int
    coverage_pct: float | None = None
    largest_gap_s: float | None = None
    rate_kept_pct: float | None = None
    clock_step_s: float | None = None
    clock_start_s: float | None = None
    clock_end_s: float | None = None
    clock_within_s: float | None = None
    sampler_ends: int = 0
    lost_gpus: list[str] = []
    incomplete: str = ""

    @property
    def trouble(self) -> str:
        """What a reader of this host's telemetry has to know besides `incomplete`, as clauses; '' if nothing."""
        clauses = []
        if self.sampler_ends:
            clauses.append(f"its sampler ended {self.sampler_ends} time{'s' * (self.sampler_ends > 1)} while the run went on")
        if self.clock_step_s is not None:
            clauses.append(
                f"its clock was set {'back' if self.clock_step_s < 0 else 'forward'} by {abs(self.clock_step_s):.1f} s"
            )
        apart_s = max((abs(offset) for offset in (self.clock_start_s, self.clock_end_s) if offset is not None), default=0.0)
        if apart_s - (self.clock_within_s or 0.0) > APART_S:
            clauses.append(f"its clock was {apart_s:.2f} s from the clock of rank 0's host")
        if self.lost_gpus:
            clauses.append(f"GPUs were lost: {', '.join(self.lost_gpus)}")
        return "; ".join(clauses)


def coverage(
    run_id: str,
    timed: pl.DataFrame,
    samples: Samples,
    ran_on: Iterable[str],
    sampler_ends: Mapping[str, int],
    clocks: Mapping[str, Mapping[str, ClockOffset]],
    steps_of: Mapping[str, float],
) -> list[Coverage]:
    """One entry per host that wrote samples or that the run ran on.

    timed: the timed steps. ran_on: the names of the hosts on which its ranks were. The others are by host; steps_of: as
    `clock_steps` returns them.
    """
    span = window(timed)
    entries = []
    hosts: dict[str, list[float]] = {host: [] for host in ran_on}
    for host, wall_s in zip(samples.hosts["host"].to_list(), samples.hosts["wall_s"].to_list(), strict=True):
        hosts.setdefault(host, []).append(wall_s)
    started_hz = samples.hosts["started_hz"].to_list()
    hz_of = {host: hz for host, hz in zip(samples.hosts["host"].to_list(), started_hz, strict=True) if hz}
    lost = (
        [] if samples.gpus.is_empty() else samples.gpus.filter("lost").select("host", "uuid").unique(maintain_order=True).rows()
    )
    for host, times in hosts.items():
        entry = Coverage(run=run_id, host=host, samples=len(times), sampler_ends=sampler_ends.get(host, 0))
        at = clocks.get(host, {})
        entry.clock_start_s, entry.clock_end_s = (at[when].offset_s if when in at else None for when in ("start", "end"))
        entry.clock_within_s = max((clock.within_s for clock in at.values()), default=None)
        entry.clock_step_s = steps_of.get(host)
        entry.lost_gpus = [uuid for of_host, uuid in lost if of_host == host]
        if span is not None:
            entry.coverage_pct, entry.largest_gap_s = covered(times, span)
            entry.incomplete = _incomplete(times, span)
            if (hz := hz_of.get(host)) and (asked := (span[1] - span[0]) * hz) >= 1:
                entry.rate_kept_pct = min(100 * sum(span[0] <= at <= span[1] for at in times) / asked, 100.0)
        entries.append(entry)
    return entries


def clock_steps(hosts: pl.DataFrame) -> dict[str, float]:
    """How far the wall clock of each host was set against its monotonic clock, in seconds, of hosts whose clock was set.

    A set clock stays set: two samples on either side must agree, so that a pause between reading the two clocks is no step.
    """
    found: dict[str, float] = {}
    seconds_ahead = hosts["wall_s"].to_numpy() - hosts["t_s"].to_numpy()
    if not len(seconds_ahead) or seconds_ahead.max() - seconds_ahead.min() <= STEP_S:  # as of nearly all runs on one host
        return found
    ahead = hosts.with_columns(ahead_s=pl.col("wall_s") - pl.col("t_s"))
    spread = pl.col("ahead_s").max() - pl.col("ahead_s").min()
    moved = ahead.filter(spread.over("host", "boot_id") > STEP_S).sort("host", "boot_id", "t_s")
    for (host, _), rows in moved.group_by("host", "boot_id", maintain_order=True):
        seconds = rows["ahead_s"].to_list()
        for before, old, new, after in zip(seconds, seconds[1:], seconds[2:], seconds[3:]):
            forward, back = min(new, after) - max(before, old), max(new, after) - min(before, old)
            if forward > STEP_S or back < -STEP_S:
                found[str(host)] = found.get(str(host), 0.0) + new - old
    return found


def _incomplete(times: list[float], span: tuple[float, float]) -> str:
    """Why ordered sample times are not of the whole span, or ''."""
    if len(times) < 2:
        return "one sample" if times else "no samples"
    most = GAP_PERIODS * _usual(times)
    if (missing_s := span[1] - times[-1]) > most:
        return f"no samples in the last {missing_s:.1f} s"
    if (missing_s := times[0] - span[0]) > most:
        return f"no samples in the first {missing_s:.1f} s"
    return ""


def _usual(times: list[float]) -> float:
    """The median distance of two sample times or more."""
    return sorted(second - first for first, second in itertools.pairwise(times))[(len(times) - 1) // 2]


def covered(times: list[float], span: tuple[float, float]) -> tuple[float, float]:
    """(percent of the span that is covered, longest gap within it in seconds) for ordered sample times in seconds.

    The usual distance is the median one; with fewer than two samples nothing is covered.
    """
    start, end = span
    usual = _usual(times) if len(times) > 1 else 0.0
    seen = sum(
        max(min(second, end) - max(first, start), 0.0)
        for first, second in itertools.pairwise(times)
        if second - first <= GAP_PERIODS * usual
    )
    edges = [start, *(time for time in times if start < time < end), end]
    longest = max(second - first for first, second in itertools.pairwise(edges))
    return 100 * seen / (end - start), longest
