"""Explains why a run is slower than another run: it divides the difference between their step times into parts, in whole ns.

The sum of the parts is exactly the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from collect.traces.answer_columns import make_ms_column
from collect.traces.run_answers import RunAnswers
from collect.traces.step_parts import StepPart, StepTime, compute_step_time
from shardlab.terminal.table import Column, Table

TimeUnit = Literal["step", "trace"]


class PartDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step (such as compute) in both runs, in ns. difference_ns = time_ns - against_ns."""

    part: StepPart
    """Which part of a step."""
    label: str
    """The part in words."""
    time_ns: int
    """The time of this part in the run."""
    against_ns: int
    """The time of this part in the other run; 0: no step of it has this part."""
    difference_ns: int
    """time_ns - against_ns."""


class StepDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of two runs. The sum over all parts is exactly difference_ns = time_ns - against_ns."""

    per: TimeUnit
    """`step` if all traces have profiler steps, else `trace`."""
    time_ns: int
    """The mean time of a step (or of a trace) over ranks and steps, in ns: from the first kernel to the last one, or on a CPU
    the duration of the profiler steps."""
    against_ns: int
    """The same time of the other run, in ns."""
    difference_ns: int
    """How much longer a step is than in the other run."""
    parts: list[PartDifference]
    """Sorted by the absolute value of their difference, the largest first."""


class DifferenceRow(NamedTuple):
    """A row of the table of a difference: a part of the step, or the whole step. Times are in ns."""

    label: str
    time_ns: int
    against_ns: int
    difference_ns: int


def make_difference_table(table_title: str, step: StepDifference, other_run_words: str) -> Table[DifferenceRow]:
    """A table that divides a difference into parts, whose sum is the difference. other_run_words: words for the other run,
    after the heading of its times."""
    difference_rows = [
        DifferenceRow(step_part.label, step_part.time_ns, step_part.against_ns, step_part.difference_ns)
        for step_part in step.parts
        if step_part.difference_ns
    ]
    difference_rows.append(DifferenceRow(f"whole {step.per}", step.time_ns, step.against_ns, step.difference_ns))
    whole_ns = step.difference_ns
    table_columns: list[Column[DifferenceRow]] = [
        Column("Part", lambda row: row.label),
        make_ms_column("Time", lambda row: row.time_ns),
        make_ms_column(f"Time {other_run_words}", lambda row: row.against_ns),
        Column("Difference", lambda row: row.difference_ns, "ms", scale=1e6, is_signed=True),
        Column("Share", lambda row: 100 * row.difference_ns / whole_ns if whole_ns else None, "%", digits=3),
    ]
    return Table(table_title, table_columns, difference_rows)


def compute_step_difference(runs: Sequence[RunAnswers], against_runs: Sequence[RunAnswers]) -> StepDifference | None:
    """The difference between the mean step of `runs` and the mean step of `against_runs`.

    None if no rank of `runs` or no rank of `against_runs` was analysed, if some ranks ran on GPUs and others on CPUs, or if a
    time of a rank is only a bound.
    """
    analyses, other_analyses = ([analysis for run in side_runs for analysis in run.ranks] for side_runs in (runs, against_runs))
    if not analyses or not other_analyses or len({analysis.kind for analysis in (*analyses, *other_analyses)}) > 1:
        return None
    if any(analysis.is_bound for analysis in (*analyses, *other_analyses)):
        return None
    by_step = all(analysis.steps for analysis in (*analyses, *other_analyses))
    run_step, against_step = (compute_step_time(side_runs, by_step=by_step) for side_runs in (runs, against_runs))
    return subtract_step_times(run_step, against_step, "step" if by_step else "trace")


def subtract_step_times(run_step: StepTime, against_step: StepTime, time_unit: TimeUnit) -> StepDifference:
    """The difference between two mean steps, part by part: time of `run_step` minus time of `against_step`."""
    part_differences = [
        PartDifference(
            part=step_part,
            label=step_part.label,
            time_ns=run_step.parts.get(step_part, 0),
            against_ns=against_step.parts.get(step_part, 0),
            difference_ns=run_step.parts.get(step_part, 0) - against_step.parts.get(step_part, 0),
        )
        for step_part in run_step.parts.keys() | against_step.parts.keys()
    ]
    return StepDifference(
        per=time_unit,
        time_ns=run_step.total_ns,
        against_ns=against_step.total_ns,
        difference_ns=run_step.total_ns - against_step.total_ns,
        parts=sorted(part_differences, key=lambda part_difference: (-abs(part_difference.difference_ns), part_difference.part)),
    )
