"""Compares the operators and kernels of two runs: which are new, gone, or called more or less often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from collect.traces.answer_columns import make_ms_column, make_name_column
from collect.traces.breakdown import count_steps, tally_events
from collect.traces.launches import divide_by_launch
from collect.traces.trace import Trace
from shardlab.terminal.table import Column

OPERATOR_CATEGORIES = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset")
OperatorChange = Literal["new", "gone", "changed", "same"]


class OperatorDifference(msgspec.Struct, frozen=True):
    """An operator or kernel in a run, compared with the same operator or kernel in another run."""

    name: str
    """Name of the kernel or operator."""
    kind: str
    """Category in the trace."""
    change: OperatorChange
    """`changed` if the number of calls per step differs. A difference of only the time is not a change, because it may be
    noise."""
    calls: float
    """Calls per step and rank in the run; 0 if there are none."""
    against_calls: float
    """Calls per step and rank in the other run; 0 if there are none."""
    time_ns: float
    """Time per step and rank in ns."""
    against_time_ns: float
    """Time per step and rank of the other run, in ns."""

    @property
    def time_difference_ns(self) -> float:
        """The time in the run minus the time in the other run, per step and rank, in ns."""
        return self.time_ns - self.against_time_ns


def make_operator_columns(other_run_words: str) -> list[Column[OperatorDifference]]:
    """The columns of a table of differences. other_run_words: words that name the other run, such as `against`; the headings of
    its numbers end with them."""
    return [
        Column("Change", lambda difference: difference.change),
        Column("Kind", lambda difference: difference.kind),
        make_name_column("Name", lambda difference: difference.name),
        Column("Calls", lambda difference: difference.calls),
        Column(f"Calls {other_run_words}", lambda difference: difference.against_calls),
        make_ms_column("Time", lambda difference: difference.time_ns),
        make_ms_column(f"Time {other_run_words}", lambda difference: difference.against_time_ns),
        Column("Difference", lambda difference: difference.time_difference_ns, "ms", scale=1e6, is_signed=True),
    ]


class OperatorUses(NamedTuple):
    """The calls of operators and kernels by all ranks together."""

    totals_by_name: dict[tuple[str, str], tuple[int, int]]
    """{(kind, name): (number of calls, time in ns)}, over all ranks and steps."""
    divisor: int
    """The number by which the totals are divided: the number of profiler steps of all ranks, or the number of ranks if whole
    traces are compared."""


def compare_trace_operators(run_traces: Sequence[Trace], against_traces: Sequence[Trace]) -> list[OperatorDifference]:
    """Every operator or kernel of the two runs, sorted by the difference in time, the greatest first.

    The values are per profiler step if all traces of both runs have profiler steps; otherwise they are per trace.
    """
    by_step = all(count_steps(trace) for trace in (*run_traces, *against_traces))
    run_uses, against_uses = (
        count_operator_uses(run_traces, by_step=by_step),
        count_operator_uses(against_traces, by_step=by_step),
    )
    operator_differences = []
    for kind, operator_name in run_uses.totals_by_name.keys() | against_uses.totals_by_name.keys():
        call_count, total_ns = run_uses.totals_by_name.get((kind, operator_name), (0, 0))
        other_call_count, other_total_ns = against_uses.totals_by_name.get((kind, operator_name), (0, 0))
        operator_differences.append(
            OperatorDifference(
                name=operator_name,
                kind=kind,
                change=_classify_change(call_count * against_uses.divisor, other_call_count * run_uses.divisor),
                calls=call_count / run_uses.divisor,
                against_calls=other_call_count / against_uses.divisor,
                time_ns=total_ns / run_uses.divisor,
                against_time_ns=other_total_ns / against_uses.divisor,
            )
        )
    return sorted(
        operator_differences, key=lambda difference: (-abs(difference.time_difference_ns), difference.kind, difference.name)
    )


def count_operator_uses(traces: Sequence[Trace], *, by_step: bool) -> OperatorUses:
    """Add up the calls of the operators and kernels of all ranks.

    Work of a GPU that was launched before the recording began is left out. by_step: whether the totals are per profiler step;
    then work that was launched outside of the steps is left out, too.
    """
    totals_by_name: dict[tuple[str, str], tuple[int, int]] = {}
    for trace in traces:
        gpu_events = divide_by_launch(trace)
        is_left_out = gpu_events.before_recording | (gpu_events.outside_steps if by_step else False)
        for kind in OPERATOR_CATEGORIES:
            for event_tally in tally_events(trace, trace.has_category(kind) & ~is_left_out):
                call_count, total_ns = totals_by_name.get((kind, event_tally.name), (0, 0))
                totals_by_name[kind, event_tally.name] = (call_count + event_tally.count, total_ns + event_tally.total_ns)
    return OperatorUses(totals_by_name, sum(count_steps(trace) if by_step else 1 for trace in traces))


def _classify_change(calls: int, other_calls: int) -> OperatorChange:
    if not calls or not other_calls:
        return "new" if calls else "gone"
    return "same" if calls == other_calls else "changed"
