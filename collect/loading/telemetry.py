"""How much of a run its telemetry saw: a mean over samples is worth what the samples cover."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
import polars as pl

from collect.sources.steps import window

GAP_PERIODS = 2.0  # between samples further apart than this many usual distances, the host was not watched


class Coverage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One host in one run.

    coverage_pct: share of the timed window between samples that are no gap apart; absent where no steps were timed.
    largest_gap_s: the longest part of the timed window without a sample; absent where no steps were timed.
    incomplete: why the samples are not of the whole timed window, as where the sampler was killed; empty if they are.
    """

    run: str
    host: str
    samples: int
    coverage_pct: float | None = None
    largest_gap_s: float | None = None
    incomplete: str = ""


def coverage(run_id: str, timed: pl.DataFrame, samples: pl.DataFrame, ran_on: Iterable[str]) -> list[Coverage]:
    """One entry per host that wrote samples or that the run ran on.

    timed, samples: the timed steps and the host samples of the run. ran_on: the names of the hosts on which its ranks were.
    """
    span = window(timed)
    entries = []
    hosts: dict[str, list[float]] = {host: [] for host in ran_on}
    for host, wall_s in zip(samples["host"].to_list(), samples["wall_s"].to_list(), strict=True):
        hosts.setdefault(host, []).append(wall_s)
    for host, times in hosts.items():
        entry = Coverage(run=run_id, host=host, samples=len(times))
        if span is not None:
            entry.coverage_pct, entry.largest_gap_s = covered(times, span)
            entry.incomplete = _incomplete(times, span)
        entries.append(entry)
    return entries


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
