"""What a matrix file says of the study that it repeats: its numbers, its claims, what it ran on, and what it leaves open."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Traces = Literal["exact", "like-hta"]  # how the study read its traces: to the nanosecond, or by HolisticTraceAnalysis


class Assumed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that the source does not state and that had to be chosen."""

    key: str
    value: Any
    why: str


class Reported(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of the source, exactly as printed.

    where: its place in the source, such as Table 2. printed: the number as text. cell: values that select the cell.
    unit: the unit if it is not printed beside the number but, for example, in the head of the table.
    of: the operator or kernel, if the metric is about one operator or kernel.
    against: for a metric that compares two cells: values that select the second cell, if that cell is not the baseline.
    kind: measured by the source; estimated (computed or extrapolated by the source); assumed (an example that nobody ran).
    """

    where: str
    metric: str
    printed: str
    cell: dict[str, Any] = {}
    unit: str | None = None
    of: str | None = None
    against: dict[str, Any] = {}
    kind: Literal["measured", "estimated", "assumed"] = "measured"


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A claim of the source. says: the sentence. where: its place. test: the claim as an expression of metrics."""

    id: str
    says: str
    test: str
    where: str


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place where the source contradicts itself or leaves a question open. says: what the problem is."""

    where: str
    says: str


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hardware and software of the source, as far as it states them. If ours differ, this is a likely reason for other numbers.

    where: the place in the source. cell: values that select the cells with this setting; without it: all cells.
    gpu: a part of the GPU's name in NVML, such as H100. link: the link between the GPUs of a node.
    network_mbps: the rate of a network interface between nodes, in Mbit/s.
    software: for each package its version, or the beginning of the version.
    """

    where: str
    gpu: str | None = None
    link: Literal["NVLink", "PCIe"] | None = None
    network_mbps: int | None = None
    software: dict[str, str] = {}
    cell: dict[str, Any] = {}
