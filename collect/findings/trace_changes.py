"""What to change in profiled cells, and what the time of their steps goes into: the data and the tables on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.findings.answer_section import REPEATS_COLUMN, AnswerSection, make_single_table_maker
from collect.findings.trace_answers import list_profiled_runs
from collect.reading.load import LoadedMatrix
from collect.traces import change_tables
from collect.traces.advice import find_advice
from collect.traces.rank_work import RankWork, sum_work
from shardlab.terminal.table import Table


class CellAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a cell, and how much time it could save at most, per step and rank."""

    cell: str
    n: int
    """Number of repeats."""
    subject: str
    """What the change is about, such as `fusion`."""
    text: str
    """What takes the time, and what helps."""
    saves_at_most_ns: int
    """An upper bound of the time that the change saves."""
    share_pct: float
    """This time as a share of the step."""


class CellWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the profiled steps of a cell go into, over all profiled ranks and n repeats together."""

    cell: str
    n: int
    """Number of repeats."""
    steps: int
    """The number of steps of all ranks."""
    work: RankWork
    """The work of all ranks and steps together."""


def list_cell_advice(loaded: LoadedMatrix) -> list[CellAdvice]:
    """What to change in each cell that was profiled by steps, the largest saving first."""
    return [
        CellAdvice(cell=cell.id, n=len(runs), **msgspec.structs.asdict(advice))
        for cell in loaded.cells
        if (runs := list_profiled_runs(cell))
        for advice in find_advice(runs, sum(rank.steps for run in runs for rank in run.ranks))
    ]


def list_cell_work(loaded: LoadedMatrix) -> list[CellWork]:
    """The work of each cell that was profiled by steps."""
    profiled_cells = [
        (cell.id, len(runs), [rank for run in runs for rank in run.ranks])
        for cell in loaded.cells
        if (runs := list_profiled_runs(cell))
    ]
    return [
        CellWork(cell=cell, n=run_count, steps=sum(rank.steps for rank in ranks), work=sum_work(rank.work for rank in ranks))
        for cell, run_count, ranks in profiled_cells
    ]


def _make_work_tables(works_of_cells: Sequence[CellWork], label_by_cell: Mapping[str, str]) -> list[Table[Any]]:
    return [
        msgspec.structs.replace(table, title=f"{label_by_cell[cell_work.cell]}: {table.title}")
        for cell_work in works_of_cells
        for table in change_tables.make_work_tables(cell_work.work, cell_work.steps)
        if table.rows
    ]


# The parts of the page of a report, by the name of the list of the summary that they show.
SECTIONS = {
    "advice": AnswerSection(
        "What to change first",
        "At most three changes of a cell, by the time that each could save. The time is an upper bound: what would go if the "
        "cause went altogether. Savings may overlap. Mean step over profiled ranks and repeats.",
        make_single_table_maker(*change_tables.ADVICE_COLUMNS, REPEATS_COLUMN),
    ),
    "work": AnswerSection(
        "What the time goes into",
        "Times are sums of durations: what runs at the same time counts twice. Own: kernels and copies that an operator "
        "launched itself; on a CPU, its time without the operators that it calls. Moved: the bytes that it must at least read "
        "and write, in the time of its kernels. Bound: the least time by FLOPs, bytes and the data sheet of the GPU, as a "
        "share of the time of its kernels. Long launching calls: warm up, or set CUDA_MODULE_LOADING=EAGER; many short ones: "
        "CUDA graphs.",
        _make_work_tables,
        is_folded=True,
    ),
}
