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

    def document(self) -> dict[str, Any]:
        """The work as JSON values."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        for values, row in zip(document["operators"], self.operators, strict=True):
            values |= {name: getattr(row, name) for name in ("flops_per_s", "bytes_per_s", "roofline_pct")}
        return document


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


def sum_work(works: Iterable[RankWork]) -> RankWork:
    """The work of several ranks together. Launching calls and streams are not added up."""
    all_works = list(works)
    together = merge_rows((use for work in all_works for use in work.together), lambda use: use.kinds, ("total_ns",))
    return RankWork(
        categories=sum_categories(entry for work in all_works for entry in work.categories),
        operators=sum_operators(row for work in all_works for row in work.operators),
        launch_calls=[calls for work in all_works for calls in work.launch_calls],
        streams=[use for work in all_works for use in work.streams],
        together=sorted(together, key=lambda use: -use.total_ns),
    )
