"""The figures (numbers) of one trace file, without its events: small enough to keep for thousands of ranks and to send as
JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collect.traces import lacks
from collect.traces.breakdown import Breakdown, compute_breakdown, count_unknown_categories
from collect.traces.launches import GPU_CATEGORIES
from collect.traces.rank_analysis import RankAnalysis, analyse_rank
from collect.traces.trace import Trace

MOST_CATEGORIES = 12  # the most unknown categories that a sentence names


class FileFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures (numbers) of a trace file."""

    path: str
    """The path of the file."""
    rank: int | None
    """The rank, from the content or the name of the file; None if neither says it."""
    breakdown: Breakdown | None
    """How the rank spent its time."""
    analysis: RankAnalysis | None
    """Further results of the rank (`RankAnalysis`). Both are None if the trace has no figures."""
    why: str
    """A clause that says why the trace has no figures; "" if it has figures, or if the file is cut short, which `damage` says.
    """
    damage: list[str]
    """Sentences about events that were lost, and about a file that was cut short."""


def compute_file_figures(trace: Trace) -> FileFigures:
    """Compute the exact figures (numbers) of a trace."""
    rank_breakdown = compute_breakdown(trace)
    return FileFigures(
        path=str(trace.path),
        rank=trace.rank,
        breakdown=rank_breakdown,
        analysis=analyse_rank(trace) if rank_breakdown else None,
        why="" if rank_breakdown or trace.cut else explain_missing_figures(trace),
        damage=describe_damage(trace),
    )


def sort_by_rank(figures: Sequence[FileFigures]) -> list[FileFigures]:
    """The figures of trace files, sorted by rank (as a number). Files without a rank come last."""
    return sorted(figures, key=lambda file_figures: rank_sort_key(file_figures.rank, file_figures.path))


def rank_sort_key(rank: int | None, path: str) -> tuple[bool, int, str]:
    """The sort key of a trace: its rank (as a number), then its path. Traces without a rank come last."""
    return rank is None, rank or 0, path


def describe_damage(trace: Trace) -> list[str]:
    """Sentences about the damage of a trace: events that were lost, and a file that was cut short."""
    lost_events = [f"{count:,} events lost: {reason}" for reason, count in trace.lost.items()]
    return [*lost_events, *([f"cut short: {trace.cut}"] if trace.cut else [])]


def explain_missing_figures(trace: Trace) -> str:
    """A clause that says why a trace has no figures."""
    if not len(trace.name):
        return "the trace has no events."
    category_counts = sorted(count_unknown_categories(trace).items(), key=lambda item: -item[1])
    if not category_counts and (lost_work := lacks.explain_lost_work(trace)):
        return lost_work
    if not category_counts:
        return "no kernels of a GPU and no operators, so there are no figures."
    named_categories = ", ".join(f"{name} ({count:,} events)" for name, count in category_counts[:MOST_CATEGORIES])
    return (
        f"no figures: the trace has events of an accelerator whose categories are not known: {named_categories}. Known: "
        f"{', '.join(GPU_CATEGORIES)}, as Kineto writes them for GPUs. --like-hta counts every event with a stream."
    )
