"""The figures (numbers) of one trace file, without its events: small enough to keep for thousands of ranks and to send as
JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from collect.traces.breakdown import Breakdown, compute_breakdown, count_unknown_categories, is_trace_of_cpu
from collect.traces.lacks import NO_GPU_WORK_SENTENCE, SPOILING, Lack, find_lacks, make_gpu_lack
from collect.traces.launches import GPU_CATEGORIES
from collect.traces.rank_analysis import RankAnalysis, analyse_rank
from collect.traces.trace import Trace

MOST_NAMED_CATEGORIES = 12  # the most unknown categories that a sentence names


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
    lacks: list[Lack]
    """What the recording lacks."""
    damage: list[str]
    """Sentences about events that were lost, and about a file that was cut short."""

    @property
    def is_usable(self) -> bool:
        """Whether figures may rank cells: the trace has figures, is not damaged, and lacks no work of the GPU."""
        is_spoiled = any(lack.kind in SPOILING for lack in self.lacks)
        return self.breakdown is not None and self.analysis is not None and not self.damage and not is_spoiled


def compute_file_figures(trace: Trace) -> FileFigures:
    """Compute the exact figures (numbers) of a trace."""
    rank_breakdown = compute_breakdown(trace)
    return FileFigures(
        path=str(trace.path),
        rank=trace.rank,
        breakdown=rank_breakdown,
        analysis=_analyse_within_bounds(trace, rank_breakdown) if rank_breakdown else None,
        why="" if rank_breakdown or trace.cut_reason else explain_missing_figures(trace),
        lacks=rank_breakdown.lacks if rank_breakdown else find_lacks(trace, np.zeros(len(trace.name), np.bool_)),
        damage=describe_damage(trace),
    )


def expect_gpu(figures: FileFigures, used_gpus: bool | None) -> FileFigures:
    """The figures of a CPU, with a lack if the run used GPUs, and without it if it used none. Figures of a GPU stay the same.

    used_gpus: whether the run used GPUs by its own record; None: not known, so that the trace decides.
    """
    rank_breakdown = figures.breakdown
    if used_gpus is None or rank_breakdown is None or rank_breakdown.source == "gpu":
        return figures
    lacks = [make_gpu_lack("the run used GPUs")] if used_gpus else []
    return msgspec.structs.replace(figures, lacks=lacks, breakdown=msgspec.structs.replace(rank_breakdown, lacks=lacks))


def _analyse_within_bounds(trace: Trace, rank_breakdown: Breakdown) -> RankAnalysis | None:
    """Further results of the rank. Idle time that is only a bound has no causes. If the time of compute is only a bound, matrix
    products and attention have no time, and so no FLOP/s."""
    analysis, bounds = analyse_rank(trace), rank_breakdown.bounds
    if analysis is None or not bounds:
        return analysis
    bounded_products, bounded_attention = ([], []) if "compute_ns" in bounds else (analysis.products, analysis.attention)
    return msgspec.structs.replace(analysis, idle=None, products=bounded_products, attention=bounded_attention, is_bound=True)


def sort_by_rank(figures: Sequence[FileFigures]) -> list[FileFigures]:
    """The figures of trace files, sorted by rank (as a number). Files without a rank come last."""
    return sorted(figures, key=lambda file_figures: make_rank_sort_key(file_figures.rank, file_figures.path))


def make_rank_sort_key(rank: int | None, path: str) -> tuple[bool, int, str]:
    """The sort key of a trace: its rank (as a number), then its path. Traces without a rank come last."""
    return rank is None, rank or 0, path


def describe_damage(trace: Trace) -> list[str]:
    """Sentences about the damage of a trace: events that were lost, and a file that was cut short."""
    lost_events = [f"{lost_count:,} events lost: {lost_reason}" for lost_reason, lost_count in trace.lost_counts.items()]
    return [*lost_events, *([f"cut short: {trace.cut_reason}"] if trace.cut_reason else [])]


def explain_missing_figures(trace: Trace) -> str:
    """A clause that says why a trace has no figures."""
    if not len(trace.name):
        return "the trace has no events."
    category_counts = sorted(count_unknown_categories(trace).items(), key=lambda item: -item[1])
    if not category_counts and not is_trace_of_cpu(trace):
        return NO_GPU_WORK_SENTENCE
    if not category_counts:
        return "no kernels of a GPU and no operators, so there are no figures."
    named_categories = ", ".join(f"{name} ({count:,} events)" for name, count in category_counts[:MOST_NAMED_CATEGORIES])
    return (
        f"no figures: the trace has events of an accelerator whose categories are not known: {named_categories}. Known: "
        f"{', '.join(GPU_CATEGORIES)}, as Kineto writes them for GPUs. --like-hta counts every event with a stream."
    )
