"""Truncates a summary for a page or a terminal, because thousands of cells are too many for a reader and for a browser."""

from __future__ import annotations

import msgspec

from collect.summary import Summary

MAX_ENTRIES = 200  # the most cells that are shown, and the most entries of each other list
_NOUNS = {"losses": "loss comparisons", "instruments": "instrument costs", "failures": "runs that did not complete"}
_NOUNS |= {"searches": "searches", "damage": "damaged runs", "outliers": "outliers"}


def truncate_summary(summary: Summary) -> Summary:
    """The summary with at most MAX_ENTRIES cells and at most MAX_ENTRIES entries in each list. A remark says how many are left
    out.

    All cells that a claim or a reported number names are kept. If there are fewer than MAX_ENTRIES such cells, other cells are
    added, in their order.
    """
    named_ids = {number.cell for verdict in summary.verdicts for number in verdict.numbers}
    named_ids |= {entry.row for entry in summary.reported if entry.row}
    other_ids = [row.id for row in summary.rows if row.id not in named_ids]
    shown_ids = named_ids | {*other_ids[: max(0, MAX_ENTRIES - len(named_ids))]}
    short = msgspec.structs.replace(
        summary,
        rows=[row for row in summary.rows if row.id in shown_ids],
        **{name: getattr(summary, name)[:MAX_ENTRIES] for name in _NOUNS},
    )
    counts_by_noun = {
        noun: (len(getattr(short, name)), len(getattr(summary, name))) for name, noun in {"rows": "cells", **_NOUNS}.items()
    }
    cuts = [f"{part_count:,} of {total:,} {noun}" for noun, (part_count, total) in counts_by_noun.items() if part_count < total]
    if cuts:
        short.remarks = [*short.remarks, f"shown here: {', '.join(cuts)}; summary.json and the tables contain all"]
    return short
