"""Makes tables that explain the time of a step of profiled cells: by process group, by slow rank, and against the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.findings.answer_section import REPEATS_COLUMN, AnswerSection, make_single_table_maker
from collect.findings.row import CellRow
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.traces.answer_columns import BANDWIDTH_COLUMNS, make_mib_column
from collect.traces.calls import label_groups
from collect.traces.collectives import CollectiveUse
from collect.traces.difference import StepDifference, compute_step_difference, make_difference_table
from collect.traces.run_answers import RunAnswers
from collect.traces.stragglers import RankWait
from shardlab.terminal import notation
from shardlab.terminal.table import Column, Table


class GroupTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of one process group in a profiled step of a cell, over all profiled ranks and n repeats.

    A value is None if the trace does not record it, or if too few ranks were profiled.
    """

    cell: str
    collective: str
    group: str
    """The name of the process group, with its ranks if several groups have the name."""
    profiled: int
    """Number of ranks of the group that were profiled. If it is less than `size`, the transfer is an upper bound, and the
    bandwidths are lower bounds."""
    size: int | None
    """Number of ranks of the group."""
    n: int
    """Number of repeats."""
    calls: float
    """Calls of a rank in a step."""
    message_bytes: float | None
    """Size of the message of a call."""
    sent_bytes: float | None
    """What a rank sends for the collective in a step, by the ring algorithm."""
    mean_us: float
    """Duration of a call."""
    transfer_us: float | None
    """Duration of a call without waiting for slow ranks."""
    hidden_pct: float | None
    """Share of the duration during which something computes."""
    algorithm_gb_per_s: float | None
    """Algorithm bandwidth as nccl-tests defines it, in 1e9 bytes/s."""
    bus_gb_per_s: float | None
    """Bus bandwidth as nccl-tests defines it, in 1e9 bytes/s."""
    link: str | None
    """The link between the GPUs of a host."""
    link_gb_per_s: float | None
    """Bandwidth of the link in one direction by its data sheet, in 1e9 bytes/s."""


class RankWaiting(msgspec.Struct, frozen=True, kw_only=True):
    """How long a rank of a cell waits for slow ranks in a profiled step, as the mean over n repeats. Times are per step."""

    cell: str
    rank: int
    n: int
    """Number of repeats."""
    last_pct: float
    """Share of the matched collectives that this rank started last."""
    waited_ms: float
    """Waiting in collectives."""
    lost_ms: float
    """Waiting in collectives while nothing computes."""
    lost_pct: float | None
    """lost_ms as a share of the profiled time."""
    caused_ms: float
    """Waiting of all other ranks together, in the collectives that this rank started last."""


class CellDifference(msgspec.Struct, frozen=True):
    """Why a step of a cell takes longer or shorter than a step of its baseline, as means over profiled ranks and repeats."""

    cell: str
    baseline: str
    step: StepDifference
    """The difference, in parts."""


def list_group_traffic(loaded: LoadedMatrix) -> list[GroupTraffic]:
    """The collectives of every cell that was profiled by steps. The collectives of a cell are ordered by time, the longest
    first."""
    return [traffic for cell in loaded.cells for traffic in list_cell_traffic(cell)]


def list_cell_traffic(cell: LoadedCell) -> list[GroupTraffic]:
    """The collectives of a cell by process group, ordered by their time, the longest first."""
    runs = list_profiled_runs(cell)
    label_by_group = label_groups(use.group for run in runs for use in run.collectives)
    uses_by_collective: dict[tuple[str, str], list[tuple[CollectiveUse, int]]] = {}
    for repeat, run in enumerate(runs):
        for use in run.collectives:
            uses_by_collective.setdefault((use.collective, label_by_group[use.group]), []).append((use, repeat))
    longest_uses = sorted(uses_by_collective.items(), key=lambda item: (-sum(use.total_ns for use, _ in item[1]), item[0]))
    return [_build_group_traffic(cell.id, collective, label, pairs, runs) for (collective, label), pairs in longest_uses]


def _build_group_traffic(
    cell_id: str, collective: str, label: str, uses_with_repeat: Sequence[tuple[CollectiveUse, int]], runs: Sequence[RunAnswers]
) -> GroupTraffic:
    """The traffic of a group, per step of its ranks. uses_with_repeat: its uses, each with the number of its run in `runs`."""
    uses = [use for use, _ in uses_with_repeat]
    process_groups = {use.group for use in uses}
    step_count = sum(rank.steps for run in runs for rank in run.ranks if not process_groups.isdisjoint(rank.groups))
    call_count = sum(use.calls for use in uses)
    total_ns, timed_ns = sum(use.total_ns for use in uses), sum(use.timed_ns for use in uses)
    total_message_bytes, bus_bytes, sent_bytes = (
        _sum_if_known([getattr(use, field) for use in uses]) for field in ("message_bytes", "bus_bytes", "sent_bytes")
    )
    transfer_ns = _sum_if_known([use.transfer_ns for use in uses])
    distinct_links = {(use.link, use.link_gb_per_s) for use in uses}
    link, link_gb_per_s = distinct_links.pop() if len(distinct_links) == 1 else (None, None)
    return GroupTraffic(
        cell=cell_id,
        collective=collective,
        group=label,
        profiled=max(use.profiled for use in uses),
        size=uses[0].group.size,
        n=len({repeat for _, repeat in uses_with_repeat}),
        calls=call_count / step_count,
        message_bytes=None if total_message_bytes is None else total_message_bytes / call_count,
        sent_bytes=None if sent_bytes is None else sent_bytes / step_count,
        mean_us=total_ns / call_count / 1000,
        transfer_us=None if transfer_ns is None else transfer_ns / call_count / 1000,
        hidden_pct=100 * sum(use.hidden_ns for use in uses) / total_ns if total_ns else None,
        algorithm_gb_per_s=None if total_message_bytes is None or not timed_ns else total_message_bytes / timed_ns,
        bus_gb_per_s=None if bus_bytes is None or not timed_ns else bus_bytes / timed_ns,
        link=link,
        link_gb_per_s=link_gb_per_s,
    )


def _sum_if_known(known_or_none: Sequence[float | None]) -> float | None:
    known_values = [value for value in known_or_none if value is not None]
    return sum(known_values) if len(known_values) == len(known_or_none) else None


def list_rank_waiting(loaded: LoadedMatrix) -> list[RankWaiting]:
    """The waiting of each rank, for every cell that was profiled by steps and whose collectives were matched over ranks."""
    waitings = []
    for cell in loaded.cells:
        waits_by_rank: dict[int, list[tuple[RankWait, int]]] = {}
        for run in list_profiled_runs(cell):
            steps_by_rank = {analysis.rank: analysis.steps for analysis in run.ranks}
            for wait in run.waits.ranks:
                waits_by_rank.setdefault(wait.rank, []).append((wait, steps_by_rank[wait.rank]))
        waitings += [_build_rank_waiting(cell.id, rank, waits) for rank, waits in sorted(waits_by_rank.items())]
    return waitings


def _build_rank_waiting(cell: str, rank: int, waits_with_steps: Sequence[tuple[RankWait, int]]) -> RankWaiting:
    call_count, span_ns = sum(wait.calls for wait, _ in waits_with_steps), sum(wait.span_ns for wait, _ in waits_with_steps)
    return RankWaiting(
        cell=cell,
        rank=rank,
        n=len(waits_with_steps),
        last_pct=100 * sum(wait.last for wait, _ in waits_with_steps) / call_count if call_count else 0,
        waited_ms=statistics.fmean(wait.waited_ns / steps / 1e6 for wait, steps in waits_with_steps),
        lost_ms=statistics.fmean(wait.lost_ns / steps / 1e6 for wait, steps in waits_with_steps),
        lost_pct=100 * sum(wait.lost_ns for wait, _ in waits_with_steps) / span_ns if span_ns else None,
        caused_ms=statistics.fmean(wait.caused_ns / steps / 1e6 for wait, steps in waits_with_steps),
    )


def list_step_differences(loaded: LoadedMatrix, rows: Sequence[CellRow]) -> list[CellDifference]:
    """The difference from the baseline, for every cell that was profiled by steps on the same kind of hardware as its baseline.

    GPUs are not compared with CPUs.
    """
    cell_by_id = {cell.id: cell for cell in loaded.cells}
    differences = []
    for row in rows:
        if row.baseline is None or row.baseline == row.id:
            continue
        step_difference = compare_steps_with_baseline(cell_by_id[row.id], cell_by_id[row.baseline])
        if step_difference is not None:
            differences.append(CellDifference(row.id, row.baseline, step_difference))
    return differences


def compare_steps_with_baseline(cell: LoadedCell, baseline: LoadedCell) -> StepDifference | None:
    """The difference between a step of a cell and a step of its baseline.

    None if one of the two cells was not profiled by steps, or if they were profiled on different kinds of hardware.
    """
    return compute_step_difference(list_profiled_runs(cell), list_profiled_runs(baseline))


def list_profiled_runs(cell: LoadedCell) -> list[RunAnswers]:
    """What the traces of each completed run of a cell show. Runs are left out if a profiled rank was not profiled by steps."""
    all_answers = [run.traces.answers for run in cell.completed_runs if run.traces.analyses]
    return [run_answers for run_answers in all_answers if all(rank.steps for rank in run_answers.ranks)]


def _make_step_tables(differences: Sequence[CellDifference], label_by_cell: Mapping[str, str]) -> list[Table[Any]]:
    tables = []
    for change in differences:
        difference_ms = notation.format_number(change.step.difference_ns / 1e6)
        title = f"{label_by_cell[change.cell]} compared with {label_by_cell[change.baseline]}"
        table = make_difference_table(title, change.step, "of the baseline")
        tables.append(msgspec.structs.replace(table, note=f"{'+' if change.step.difference_ns > 0 else ''}{difference_ms} ms"))
    return tables


# The parts of the page of a report, by the name of the list of the summary that they show.
SECTIONS = {
    "steps": AnswerSection(
        "Why a step takes longer than the baseline's",
        "Exact values; mean step over profiled ranks and repeats. The parts sum to the difference of the step times.",
        _make_step_tables,
        is_folded=True,
    ),
    "groups": AnswerSection(
        "Collectives by process group",
        "Exact values; over profiled ranks and repeats. Bandwidths as nccl-tests defines them "
        "(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), of the transfer where it is known, else of the "
        "whole call. Calls and sent: of a rank in a step; sent by the ring algorithm. Link: one direction, by the data sheet. "
        "Blank: the trace does not record it. If not all ranks of the group were profiled, transfer is an upper bound, and "
        "bandwidths are lower bounds.",
        make_single_table_maker(
            Column("Collective", lambda use: use.collective),
            Column("Process group", lambda use: use.group, is_number=False),
            Column("Profiled", lambda use: f"{use.profiled} of {use.size}" if use.size else None, is_number=True),
            Column("Calls", lambda use: use.calls),
            make_mib_column("Message", lambda use: use.message_bytes),
            make_mib_column("Sent", lambda use: use.sent_bytes),
            Column("Mean of a call", lambda use: use.mean_us, "us"),
            Column("Transfer", lambda use: use.transfer_us, "us"),
            *BANDWIDTH_COLUMNS,
            Column("Name of the link", lambda use: use.link, is_number=False),
            REPEATS_COLUMN,
        ),
    ),
    "waiting": AnswerSection(
        "Waiting for slow ranks",
        "Collectives matched over the profiled ranks by process group, step and order; mean step over repeats. The "
        "rank that starts a collective last does not wait: its call is the shortest, and what others need longer is "
        "waiting. Lost: nothing computes meanwhile.",
        make_single_table_maker(
            Column("Rank", lambda wait: wait.rank),
            Column("Started last", lambda wait: wait.last_pct, "%"),
            Column("Waited", lambda wait: wait.waited_ms, "ms"),
            Column("Lost", lambda wait: wait.lost_ms, "ms"),
            Column("Lost", lambda wait: wait.lost_pct, "%"),
            Column("Others waited for it", lambda wait: wait.caused_ms, "ms"),
            REPEATS_COLUMN,
        ),
    ),
}
