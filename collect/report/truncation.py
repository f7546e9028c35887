"""The part of a summary that a page or a terminal shows: thousands of cells are too many for a reader and for a browser."""

from __future__ import annotations

import msgspec

from collect.summary import Summary

MOST = 200  # cells, and entries of every other list
_LISTS = {"losses": "loss comparisons", "instruments": "instrument costs", "failures": "runs that did not complete"}
_LISTS |= {"damage": "damaged runs", "outliers": "outliers"}


def of(summary: Summary) -> Summary:
    """The summary itself, or its first cells, those that claims and reported numbers name among them, and the first entries of
    its lists, with a remark that says what is left out."""
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
