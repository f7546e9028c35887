"""Draws runs on a terminal while a command waits for them. `jobs.watch` imports this module only for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from jobs import status_table
from jobs.reconcile import Status
from shardlab.rich_console import drawn_table


def drawn(runs: Sequence[Status], width: int, height: int) -> Group:
    """The live table of --watch and --wait, drawn for a terminal of this size (in characters and lines)."""
    shown = status_table.table(runs, width, height)
    table = drawn_table(shown.columns, shown.rows, shown.styles)
    more = f" {shown.left_out} of them not shown." if shown.left_out else ""
    return Group(table, status_table.summary(runs) + more)
