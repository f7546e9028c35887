"""Columns of the tables of trace answers: their units and limits, for the terminal and for the page of a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from collect.traces.breakdown import Breakdown
from shardlab.terminal import notation
from shardlab.terminal.table import Column

Row = TypeVar("Row")
NumberGetter = Callable[[Row], float | None]

MOST_ROWS = 12  # the most rows of a run or cell that a table shows; the JSON documents contain all rows
MOST_LAYERS = 40  # the same for the table of modules
# The most characters of the name of a kernel: names of C++ templates may have hundreds. Cut names of one table stay different.
LONGEST_NAME = 72


def make_ms_column(heading: str, get_ns: NumberGetter[Row]) -> Column[Row]:
    """A column of times in milliseconds. get_ns: the time of a row in nanoseconds; None: not known."""
    return Column(heading, get_ns, "ms", scale=1e6)


def make_bound_column(heading: str, field_name: str) -> Column[Breakdown]:
    """A column of times of ranks in milliseconds, with a sign before a bound; blank if not even a bound is known.

    field_name: the name of the time."""

    def format_time(breakdown: Breakdown) -> str | None:
        time_ns: int | None = getattr(breakdown, field_name)
        bound = breakdown.bounds.get(field_name, "")
        bound_sign = {"at least": "≥ ", "at most": "≤ "}.get(bound, "")
        ms_text = None if time_ns is None or bound == "unknown" else notation.format_number(time_ns / 1e6)
        return None if ms_text is None else f"{bound_sign}{ms_text}"

    return Column(heading, format_time, "ms", is_number=True)


def make_us_column(heading: str, get_ns: NumberGetter[Row]) -> Column[Row]:
    """A column of times in microseconds. get_ns: the time of a row in nanoseconds; None: not known."""
    return Column(heading, get_ns, "us", scale=1e3)


def make_mib_column(heading: str, get_bytes: NumberGetter[Row]) -> Column[Row]:
    """A column of sizes in MiB. get_bytes: the size of a row in bytes; None: not known."""
    return Column(heading, get_bytes, "MiB", scale=notation.MIB)


def make_name_column(heading: str, get_name: Callable[[Row], str]) -> Column[Row]:
    """A column of names of operators or kernels, of which long names are cut."""
    return Column(heading, get_name, longest=LONGEST_NAME, is_code=True, is_number=False)


# Columns that have the same values in the rows of a run, which the terminal shows, and in the rows of a cell, on the page.
BANDWIDTH_COLUMNS: tuple[Column[Any], ...] = (
    Column("Hidden", lambda use: use.hidden_pct, "%"),
    Column("Algorithm bandwidth", lambda use: use.algorithm_gb_per_s, "GB/s"),
    Column("Bus bandwidth", lambda use: use.bus_gb_per_s, "GB/s"),
    Column("Link", lambda use: use.link_gb_per_s, "GB/s"),
)
SIZE_COLUMNS: tuple[Column[Any], ...] = (
    make_name_column("Operator", lambda product: product.operator),
    Column("Batch", lambda product: product.batch),
    Column("M", lambda product: product.m),
    Column("N", lambda product: product.n),
    Column("K", lambda product: product.k),
    Column("Types", lambda product: product.dtype, is_number=False),
    Column("Calls", lambda product: product.calls),
)
ACHIEVED_FLOPS_COLUMN: Column[Any] = Column("Achieved", lambda product: product.flops_per_s, "TFLOP/s", scale=1e12)
ATTENTION_COLUMNS: tuple[Column[Any], ...] = (
    Column("Implementation", lambda use: use.backend),
    Column("Pass", lambda use: "backward" if use.backward else "forward"),
    make_name_column("Operator or kernel", lambda use: use.name),
    make_name_column("Its kernels", lambda use: "" if use.kernels == [use.name] else ", ".join(use.kernels)),
    Column("Calls", lambda use: use.calls),
)
