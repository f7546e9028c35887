"""How a rank uses its time: by category of work, by operator, by launching calls, by streams, and by what runs together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from collect.traces.activities import Activities
from collect.traces.operator_times import CategoryTime, OperatorTime, measure_operators, sum_categories, sum_operators
from collect.traces.rank_sums import merge_rows
from collect.traces.stream_use import (
    LaunchCalls,
    RunningTogether,
    StreamUse,
    measure_launch_calls,
    measure_streams,
    measure_together,
)
from collect.traces.trace import Trace


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """What works in the profiled steps of a rank, or of several ranks together."""

    categories: list[CategoryTime]
    """The time by category of work, the longest first."""
    operators: list[OperatorTime]
    """The time of each operator by its inputs, the longest own time first."""
    launch_calls: list[LaunchCalls]
    """The calls that launched the work of each rank; empty if no launch is recorded."""
    streams: list[StreamUse]
    """The streams of each rank, the busiest first."""
    together: list[RunningTogether]
    """How long compute, communication and memory operations run alone and together."""

    def make_document(self) -> dict[str, Any]:
        """The work as JSON values."""
        work_document: dict[str, Any] = msgspec.to_builtins(self)
        for operator_document, row in zip(work_document["operators"], self.operators, strict=True):
            operator_document |= {name: getattr(row, name) for name in ("flops_per_s", "bytes_per_s", "roofline_pct")}
        return work_document


def measure_work(trace: Trace, activities: Activities) -> RankWork:
    """How a rank uses its time."""
    categories, operators = measure_operators(trace, activities)
    return RankWork(
        categories=categories,
        operators=operators,
        launch_calls=measure_launch_calls(trace, activities),
        streams=measure_streams(trace, activities),
        together=measure_together(activities),
    )


def sum_work(rank_works: Iterable[RankWork]) -> RankWork:
    """The work of several ranks together. Launching calls and streams are not added up."""
    work_list = list(rank_works)
    summed_together = merge_rows((use for work in work_list for use in work.together), lambda use: use.kinds, ("total_ns",))
    return RankWork(
        categories=sum_categories(category_time for work in work_list for category_time in work.categories),
        operators=sum_operators(row for work in work_list for row in work.operators),
        launch_calls=[calls for work in work_list for calls in work.launch_calls],
        streams=[use for work in work_list for use in work.streams],
        together=sorted(summed_together, key=lambda use: -use.total_ns),
    )
