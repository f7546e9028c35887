"""The table of `jobs status`: the text of each column, and which columns and rows fit the size of the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from jobs.status.reconcile import Status
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.runs.state import FINAL_STATES
from shardlab.terminal import moments, plain_table
from shardlab.terminal.table import Column, Table
from shardlab.workspace import handles

# The columns that a narrow terminal does not show, in the order in which they are dropped: first the order if a run is running,
# then the order if no run is running.
HIDDEN_WHILE_RUNNING = ("scheduler", "ended", "units/s", "started", "to go", "step", "took")
HIDDEN_WHEN_ENDED = ("scheduler", "units/s", "to go", "step", "ended", "started", "took")
REASON_HEADING = "why"  # a terminal that is too narrow for this column shows the reasons below the table
STYLES_BY_STATE = {
    "completed": "green",
    "running": "cyan",
    "pending": "dim",
    "planned": "dim",
    "unknown": "red",
    "failed": "red",
}
NON_ROW_LINES = 6  # the number of lines of a live table that are not rows: heading, rule, edges, summary


def make_table(statuses: Sequence[Status], width: int | None = None, height: int | None = None) -> Table[Status]:
    """The runs as a table, with the runs and columns for which the terminal has room.

    width, height: the size of the terminal in characters and lines; None: no limit.
    """
    shown_statuses = list(statuses) if height is None else _select_runs(statuses, max(height - NON_ROW_LINES, 1))
    is_running = any(run.state == "running" for run in shown_statuses)
    styles = [STYLES_BY_STATE.get(run.state, "yellow") for run in shown_statuses]
    columns = _make_columns(HIDDEN_WHILE_RUNNING if is_running else HIDDEN_WHEN_ENDED)
    if any(run.handle for run in statuses):
        columns.insert(0, handles.make_handle_column(lambda run: run.handle))
    table = Table("", columns, shown_statuses, styles=styles)
    if width is None:
        return table
    fitted_table = plain_table.fit_table(table, width)
    return msgspec.structs.replace(fitted_table, hidden=[name for name in fitted_table.hidden if name != REASON_HEADING])


def list_reasons(table: Table[Status]) -> list[str]:
    """Lines below the table: the reasons of its runs, if the table has no room for them."""
    if REASON_HEADING in table.headings:
        return []
    return [f"{run.id}: {reason}" for run in table.rows if (reason := _describe_reasons(run))]


def summarize_runs(statuses: Sequence[Status]) -> str:
    """A line that says how many runs are in each state, how many are rehearsals, and in which time zone the times are."""
    state_counts = sorted(
        Counter(status.state for status in statuses).items(),
        key=lambda state_count: (state_count[0] in FINAL_STATES, state_count[0]),
    )
    rehearsal_count = sum(bool(status.rehearsal) for status in statuses)
    rehearsal_note = f" {rehearsal_count} of them a {REHEARSAL_NOTE}." if rehearsal_count else ""
    zone_note = f" Times are {datetime.now().astimezone():%Z}." if any(status.started for status in statuses) else ""
    return (
        f"{len(statuses)} run(s): {', '.join(f'{count} {state}' for state, count in state_counts)}.{rehearsal_note}{zone_note}"
    )


def _make_columns(hidden_headings: Sequence[str]) -> list[Column[Status]]:
    """All columns. hidden_headings: the headings of those that a narrow terminal does not show, as they are dropped."""
    zone = datetime.now().astimezone().tzinfo

    def format_start(run: Status) -> str:
        return _format_moment(run.started.astimezone(zone), datetime.now(zone)) if run.started else ""

    def format_end(run: Status) -> str:
        if not run.ended:
            return ""
        return _format_moment(run.ended.astimezone(zone), (run.started or datetime.now(zone)).astimezone(zone))

    texts_by_heading: dict[str, Callable[[Status], str]] = {
        "run": lambda run: run.id,
        "state": lambda run: run.state,
        "scheduler": lambda run: str(run.scheduler["raw"]),
        "step": lambda run: f"{run.step or 0} of {run.steps}" if run.steps is not None and run.step is not None else "",
        "units/s": lambda run: f"{run.throughput:,.0f}" if run.throughput is not None else "",
        "to go": lambda run: moments.format_duration(run.eta_s) if run.eta_s is not None else "",
        "started": format_start,
        "ended": format_end,
        "took": lambda run: moments.format_duration(run.duration_s) if run.duration_s is not None else "",
        REASON_HEADING: _describe_reasons,
    }
    priorities = {heading: len(hidden_headings) - index for index, heading in enumerate(hidden_headings)}
    return [
        Column(heading, text, priority=priorities.get(heading, 0), is_sentence=heading == REASON_HEADING)
        for heading, text in texts_by_heading.items()
    ]


def _describe_reasons(run: Status) -> str:
    resumed_text = f"resumed from step {run.resumed_from_step}" if run.resumed_from_step is not None else ""
    return "; ".join(filter(None, (run.why, resumed_text, *run.trouble)))


def _format_moment(moment: datetime, reference: datetime) -> str:
    """A time as text: only the time of day if `moment` is on the date of `reference`; else with the date, and with the year if
    the years differ too."""
    if moment.date() == reference.date():
        return f"{moment:%H:%M:%S}"
    return f"{moment:%b %d %H:%M:%S}" if moment.year == reference.year else f"{moment:%Y-%m-%d %H:%M}"


def _select_runs(statuses: Sequence[Status], most_rows: int) -> list[Status]:
    """Choose at most `most_rows` statuses: running runs are preferred, then runs that ended unexpectedly, then waiting runs,
    then runs that ended as expected. The chosen runs keep their order."""

    def make_rank_key(run: Status) -> int:
        if run.state == "running":
            return 0
        return 3 if run.expected else 2 if run.state in ("pending", "planned") else 1

    kept_ids = {run.id for run in sorted(statuses, key=make_rank_key)[:most_rows]}
    return [run for run in statuses if run.id in kept_ids]
