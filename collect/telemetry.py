"""How much of a run its telemetry saw: a mean over samples is worth what the samples cover."""

from __future__ import annotations

import itertools

import msgspec
import polars as pl

from collect.sources.steps import window

GAP_PERIODS = 2.0  # between samples further apart than this many usual distances, the host was not watched


class Coverage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One host in one run. coverage_pct: share of the timed window between samples that are no gap apart; largest_gap_s:
    the longest part of the window without a sample. Both are absent where no steps were timed."""

    run: str
    host: str
    samples: int
    coverage_pct: float | None = None
    largest_gap_s: float | None = None


def coverage(run_id: str, timed: pl.DataFrame, samples: pl.DataFrame) -> list[Coverage]:
    """One entry per host that wrote samples. timed, samples: the timed steps and the host samples of the run."""
    span = window(timed)
    found = []
    hosts: dict[str, list[float]] = {}
    for host, wall_s in zip(samples["host"].to_list(), samples["wall_s"].to_list(), strict=True):
        hosts.setdefault(host, []).append(wall_s)
    for host, times in hosts.items():
        entry = Coverage(run=run_id, host=host, samples=len(times))
        if span is not None:
            entry.coverage_pct, entry.largest_gap_s = covered(times, span)
        found.append(entry)
    return found


def covered(times: list[float], span: tuple[float, float]) -> tuple[float, float]:
    """(percent of the span that is covered, longest gap within it in seconds) for ordered sample times in seconds.

    The usual distance is the median one; with fewer than two samples nothing is covered.
    """
    start, end = span
    gaps = [second - first for first, second in itertools.pairwise(times)]
    usual = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    seen = sum(
        max(min(second, end) - max(first, start), 0.0)
        for first, second in itertools.pairwise(times)
        if second - first <= GAP_PERIODS * usual
    )
    edges = [start, *(time for time in times if start < time < end), end]
    longest = max(second - first for first, second in itertools.pairwise(edges))
    return 100 * seen / (end - start), longest
