"""Groups cells into the lines of a figure, and names the lines. The cells of a line differ only in the keys of the x axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from collect.figure import CellMark, escape
from collect.findings import columns
from collect.findings.row import CellRow
from shardlab.matrix.cell import Role, keys_with_role


def group_alike(marks: Sequence[CellMark], ignored_keys: Collection[str]) -> list[list[CellMark]]:
    """Group cells that differ only in the keys `ignored_keys`. Groups and cells keep the order of `marks`."""
    groups: dict[bytes, list[CellMark]] = {}
    for mark in marks:
        rest = _drop_keys(msgspec.to_builtins(mark.cell.cell), ignored_keys)
        groups.setdefault(msgspec.json.encode(rest, order="sorted"), []).append(mark)
    return list(groups.values())


def line_labels(lines: Sequence[tuple[CellMark, Mapping[str, Any]]], ignored_keys: Collection[str]) -> list[str]:
    """A unique label for each line, HTML-escaped.

    lines: for each line, one of its cells, and additional keys with values that its label shows. ignored_keys: keys of the cell
    that no label shows."""
    return [escape(label) for label in columns.row_labels(_label_rows(lines, ignored_keys))]


def line_variants(lines: Sequence[tuple[CellMark, Mapping[str, Any]]], ignored_keys: Collection[str]) -> list[str]:
    """For each line a name, HTML-escaped, that tells it apart from the lines of its strategy. lines, ignored_keys: as in
    `line_labels`."""
    return [escape(name) for name in columns.row_variants(_label_rows(lines, ignored_keys), "strategy")]


def _label_rows(lines: Sequence[tuple[CellMark, Mapping[str, Any]]], ignored_keys: Collection[str]) -> list[CellRow]:
    cells = [_drop_keys(mark.row.cell, ignored_keys) | {"gpus": mark.row.cell["gpus"]} | dict(extra) for mark, extra in lines]
    return [msgspec.structs.replace(mark.row, cell=cell) for (mark, _), cell in zip(lines, cells, strict=True)]


def _drop_keys(cell: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The cell without the keys of bookkeeping and without `keys`, which may be options (`options.NAME`)."""
    dropped = keys_with_role(Role.BOOKKEEPING).union(keys)
    remaining = {key: value for key, value in cell.items() if key not in dropped}
    if "options" in remaining:
        remaining["options"] = {name: value for name, value in remaining["options"].items() if f"options.{name}" not in dropped}
    return remaining
