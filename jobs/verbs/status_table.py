"""The table of `jobs status`: the text of each column, and which columns and rows fit the size of the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, tzinfo

import msgspec

from jobs.status.reconcile import Status
from shardlab.runs.run import REHEARSAL
from shardlab.runs.state import FINAL
from shardlab.terminal import moments, plain_table

RUN, STATE, SCHEDULER, STEP, RATE, TO_GO, STARTED, ENDED, TOOK, WHY = (
    "run", "state", "scheduler", "step", "units/s", "to go", "started", "ended", "took", "why",
)  # fmt: skip
COLUMNS = (RUN, STATE, SCHEDULER, STEP, RATE, TO_GO, STARTED, ENDED, TOOK, WHY)
# The columns that a narrow terminal does not show, in the order in which they are dropped: first the order if a run is running,
# then the order if no run is running.
WHILE_RUNNING = (SCHEDULER, ENDED, RATE, STARTED, TO_GO, STEP, TOOK)
WHEN_ENDED = (SCHEDULER, RATE, TO_GO, STEP, ENDED, STARTED, TOOK)
GAP = 2  # spaces between two columns
STYLES = {"completed": "green", "running": "cyan", "pending": "dim", "planned": "dim", "unknown": "red", "failed": "red"}
LEAST_WHY = 36  # the least width of the column of reasons, in characters; if there is less room, reasons stand below the table
OTHER_LINES = 6  # the number of lines of a live table that are not rows: heading, rule, edges, summary


class StatusTable(msgspec.Struct, frozen=True):
    """The table of `jobs status`, with the runs and columns for which the terminal has room."""

    columns: list[str]
    """The names of the columns."""
    rows: list[list[str]]
    """The texts of the cells, row by row."""
    runs: list[Status]
    """The run of each row."""
    below: list[str]
    """Lines below the table: the reasons of runs, if the table has no room for them."""
    left_out: int = 0
    """The number of runs that are not shown."""

    @property
    def styles(self) -> list[str]:
        """The style of each row on a terminal, which shows the state of the run as a colour."""
        return [STYLES.get(run.state, "yellow") for run in self.runs]


def make_table(runs: Sequence[Status], width: int | None = None, height: int | None = None) -> StatusTable:
    """The runs as a table. width, height: the size of the terminal in characters and lines; None: no limit."""
    listed_runs = list(runs) if height is None else _select_runs(runs, max(height - OTHER_LINES, 1))
    zone = datetime.now().astimezone().tzinfo
    rows = [_format_row(run, zone) for run in listed_runs]
    shown_columns, below = list(COLUMNS), list[str]()
    if width is not None:
        shown_columns = _select_columns(listed_runs, rows, width)
        if WHY not in shown_columns:
            below = [f"{run.id}: {row[WHY]}" for run, row in zip(listed_runs, rows, strict=True) if row[WHY]]
    cells = [[row[name] for name in shown_columns] for row in rows]
    return StatusTable(shown_columns, cells, listed_runs, below, len(runs) - len(listed_runs))


def summarize_runs(runs: Sequence[Status]) -> str:
    """A line that says how many runs are in each state, how many are rehearsals, and in which time zone the times are."""
    counts = sorted(Counter(status.state for status in runs).items(), key=lambda item: (item[0] in FINAL, item[0]))
    rehearsed = sum(bool(status.rehearsal) for status in runs)
    note = f" {rehearsed} of them a {REHEARSAL}." if rehearsed else ""
    zone = f" Times are {datetime.now().astimezone():%Z}." if any(status.started for status in runs) else ""
    return f"{len(runs)} run(s): {', '.join(f'{count} {name}' for name, count in counts)}.{note}{zone}"


def _format_row(run: Status, zone: tzinfo | None) -> dict[str, str]:
    resumed = f"resumed from step {run.resumed_from_step}" if run.resumed_from_step is not None else ""
    started, ended = (moment.astimezone(zone) if moment else None for moment in (run.started, run.ended))
    return {
        RUN: run.id,
        STATE: run.state,
        SCHEDULER: run.scheduler["raw"],
        STEP: f"{run.step or 0} of {run.steps}" if run.steps is not None and run.step is not None else "",
        RATE: f"{run.throughput:,.0f}" if run.throughput is not None else "",
        TO_GO: moments.format_duration(run.eta_s) if run.eta_s is not None else "",
        STARTED: _format_moment(started, datetime.now(zone)) if started else "",
        ENDED: _format_moment(ended, started or datetime.now(zone)) if ended else "",
        TOOK: moments.format_duration(run.duration_s) if run.duration_s is not None else "",
        WHY: "; ".join(filter(None, (run.why, resumed, *run.trouble))),
    }


def _format_moment(moment: datetime, reference: datetime) -> str:
    """A time as text: only the time of day if `moment` is on the date of `reference`; else with the date, and with the year if
    the years differ too."""
    if moment.date() == reference.date():
        return f"{moment:%H:%M:%S}"
    return f"{moment:%b %d %H:%M:%S}" if moment.year == reference.year else f"{moment:%Y-%m-%d %H:%M}"


def _select_columns(runs: Sequence[Status], rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The names of the columns that are shown: columns with text, as many as fit into one line. Only the column `why` may be
    folded into several lines; if there is no room for the folded column, the column is left out."""
    widths = {
        name: max([plain_table.display_width(name), *(plain_table.display_width(row[name]) for row in rows)])
        for name in COLUMNS
    }
    shown_columns = [name for name in COLUMNS if name in (RUN, STATE) or any(row[name] for row in rows)]
    for dropped in ("", *(WHILE_RUNNING if any(run.state == "running" for run in runs) else WHEN_ENDED)):
        shown_columns = [name for name in shown_columns if name != dropped]
        used_width = sum(widths[name] + GAP for name in shown_columns if name != WHY)
        if used_width - GAP <= width:
            break
    if WHY in shown_columns and used_width + min(widths[WHY], LEAST_WHY) > width:
        shown_columns.remove(WHY)
    return shown_columns


def _select_runs(runs: Sequence[Status], most_rows: int) -> list[Status]:
    """Choose at most `most_rows` runs: running runs are preferred, then runs that ended unexpectedly, then waiting runs, then
    runs that ended as expected. The chosen runs keep their order."""

    def rank(run: Status) -> int:
        if run.state == "running":
            return 0
        return 3 if run.expected else 2 if run.state in ("pending", "planned") else 1

    kept_ids = {run.id for run in sorted(runs, key=rank)[:most_rows]}
    return [run for run in runs if run.id in kept_ids]
