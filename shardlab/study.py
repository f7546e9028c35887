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
    """Its place in the study, such as Table 2."""
    metric: str
    """The metric that measures it here (`collect metrics`)."""
    printed: str
    """The number as text."""
    cell: dict[str, Any] = {}
    """Keys and values that select the cell."""
    adapted: str = ""
    """How the cells here differ from those of the study, if `jobs plan --adapt` changed them; empty: not at all."""
    unit: str | None = None
    """The unit if it is not printed beside the number but, for example, in the head of the table."""
    of: str | None = None
    """The operator or kernel, if the metric is about one operator or kernel."""
    against: dict[str, Any] = {}
    """For a metric that compares two cells: keys and values that select the second cell, if that cell is not the baseline."""
    kind: Literal["measured", "estimated", "assumed"] = "measured"
    """measured: by the study. estimated: computed or extrapolated by the study. assumed: an example that nobody ran."""


class PrintedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a table of the study that is mostly text."""

    texts: list[str]
    """The text of each column, in our own words if it is a sentence."""
    cell: dict[str, Any] = {}
    """Keys and values that select the cells that the row is about; empty: none."""


class PrintedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the study that is mostly text, such as a guide. Its numbers are entries of `reported` too, if a metric
    measures them."""

    where: str
    """Its place in the study, such as Table 2."""
    title: str
    """What the table is about, in a few words."""
    columns: list[str]
    """The headings of its columns."""
    rows: list[PrintedRow]
    """The rows."""
    measured: list[str] = []
    """Metrics that are shown beside each row, as measured in the one cell that the row selects."""
    choice: Literal["wins", "best"] | None = None
    """What the computed choice says beside each row. wins: how often the cells of the row are the best of a comparison. best:
    the best cells of the comparisons in which the cells of the row take part. null: nothing."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A claim of the study and its test."""

    id: str
    """The name of the claim, which no other claim of the matrix has."""
    says: str
    """The claim as a sentence."""
    test: str
    """The claim as an expression of metrics (docs/verdicts.md)."""
    where: str
    """Its place in the study."""
    adapted: str = ""
    """How the cells here differ from those of the study, if `jobs plan --adapt` changed them; empty: not at all."""


class Deviation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A difference to the matrix of the study, which `jobs plan --adapt` made so that the matrix fits a cluster."""

    key: str
    """What differs: a key of a resolved cell; `cell`: a cell that is left out; `claims.ID`; or `reported`."""
    study: Any
    """The value in the matrix of the study."""
    here: Any
    """The value in this matrix; null: left out."""
    why: str
    """The reason, in a sentence."""
    cells: int | None = None
    """The number of cells with this difference; null: it is not about cells."""


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
