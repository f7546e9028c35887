"""The entries of a matrix file about the study that it repeats: reported numbers, claims, hardware and open questions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Traces = Literal["exact", "like-hta"]  # how the study analysed its traces: to the nanosecond, or with HTA


class Assumed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that the source does not state and that had to be chosen."""

    key: str
    """The key of the cell."""
    value: Any
    """The value that was chosen."""
    why: str
    """The reason for this value, in a sentence."""


class Reported(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of the study, exactly as printed."""

    where: str
    """The place of the number in the study, such as Table 2."""
    metric: str
    """The metric with which shardlab measures this number (`collect metrics`)."""
    printed: str
    """The number as text."""
    cell: dict[str, Any] = {}
    """Keys and values that select the cell."""
    adapted: str = ""
    """How the cells of this matrix differ from the cells of the study, if `jobs plan --adapt` changed them; empty: they do not
    differ."""
    unit: str | None = None
    """The unit if it is not printed beside the number but, for example, in the head of the table."""
    of: str | None = None
    """The operator or kernel, if the metric is about one operator or kernel."""
    against: dict[str, Any] = {}
    """For a metric that compares two cells: keys and values that select the second cell, if that cell is not the baseline."""
    kind: Literal["measured", "estimated", "assumed"] = "measured"
    """measured: the study measured the number. estimated: the study computed or extrapolated the number. assumed: the number
    belongs to an example that nobody ran."""


class PrintedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a table of the study that is mostly text."""

    texts: list[str]
    """The text of each column. Sentences of the study are written in other words."""
    cell: dict[str, Any] = {}
    """Keys and values that select the cells that the row is about; empty: the row is about no cells."""


class PrintedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the study that is mostly text, such as a guide. Its numbers are entries of `reported` too, if a metric
    measures them."""

    where: str
    """The place of the table in the study, such as Table 2."""
    title: str
    """What the table is about, in a few words."""
    columns: list[str]
    """The headings of the columns."""
    rows: list[PrintedRow]
    """The rows."""
    measured: list[str] = []
    """Metrics whose measured values are shown beside each row that selects exactly one cell."""
    choice: Literal["wins", "best"] | None = None
    """Which result of the computed choice is shown beside each row. wins: in how many comparisons a cell of the row is the
    best. best: the best cells of the comparison with the most ranks in which a cell of the row takes part. null: nothing."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A claim of the study and its test."""

    id: str
    """The name of the claim, which no other claim of the matrix has."""
    says: str
    """The claim as a sentence."""
    test: str
    """The claim as an expression of metrics (docs/verdicts.md)."""
    where: str
    """The place of the claim in the study."""
    quote: str = ""
    """The claim in the words of the study, at most 30 words; ` ... ` stands for words that are left out."""
    adapted: str = ""
    """How the cells of this matrix differ from the cells of the study, if `jobs plan --adapt` changed them; empty: they do not
    differ."""


class Deviation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A difference to the original matrix, which `jobs plan --adapt` made so that the matrix fits a cluster, or which the user
    asked for with --set."""

    key: str
    """What differs: a key of a resolved cell; `cell` for a cell that is left out; `claims.ID` for the claim ID; or `reported`
    for reported numbers."""
    study: Any
    """The value in the original matrix; null: not given there."""
    here: Any
    """The value in this matrix; null: left out."""
    why: str
    """The reason, in a sentence."""
    cells: int | None = None
    """The number of cells with this difference; null: the difference is not about cells."""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place where the study contradicts itself or leaves a question open."""

    where: str
    """The place in the study."""
    says: str
    """What the problem is."""


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hardware and software of the study, as far as it states them. If ours differ, this is a likely reason for other
    numbers."""

    where: str
    """The place in the study."""
    gpu: str | None = None
    """A part of the GPU's name in NVML, such as H100."""
    link: Literal["NVLink", "PCIe"] | None = None
    """The link between the GPUs of a node."""
    network_mbps: int | None = None
    """The rate of a network interface between nodes, in Mbit/s."""
    software: dict[str, str] = {}
    """For each package its version, or the beginning of the version."""
    cell: dict[str, Any] = {}
    """Keys and values that select the cells with this setting; empty: all cells."""
