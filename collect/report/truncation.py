"""Truncates a summary for a page or a terminal, because thousands of cells are too many for a reader and for a browser."""

from __future__ import annotations

import msgspec

from collect.summary import Summary

MOST = 200  # the most cells that are shown, and the most entries of each other list
_LISTS = {"losses": "loss comparisons", "instruments": "instrument costs", "failures": "runs that did not complete"}
_LISTS |= {"searches": "searches", "damage": "damaged runs", "outliers": "outliers"}


def of(summary: Summary) -> Summary:
    """The summary with at most MOST cells and at most MOST entries in each list. A remark says how many are left out.

    All cells that a claim or a reported number names are kept. If there are fewer than MOST such cells, other cells are added,
    in their order.
    """
    named = {number.cell for verdict in summary.verdicts for number in verdict.numbers}
    named |= {entry.row for entry in summary.reported if entry.row}
    others = [row.id for row in summary.rows if row.id not in named]
    kept = named | {*others[: max(0, MOST - len(named))]}
    cut = msgspec.structs.replace(
        summary,
        rows=[row for row in summary.rows if row.id in kept],
        **{name: getattr(summary, name)[:MOST] for name in _LISTS},
    )
    counts = {
        what: (len(getattr(cut, name)), len(getattr(summary, name))) for name, what in {"rows": "cells", **_LISTS}.items()
    }
    said = [f"{shown:,} of {there:,} {what}" for what, (shown, there) in counts.items() if shown < there]
    if said:
        cut.remarks = [*cut.remarks, f"shown here: {', '.join(said)}; summary.json and the tables contain all"]
    return cut
