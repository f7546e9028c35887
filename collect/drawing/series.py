"""Groups cells into the lines of a figure, and names the lines. The cells of a line differ only in the keys of the x axis."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from collect.figure import CellMark
from collect.findings import columns
from collect.findings.row import CellRow
from shardlab.matrix.cell import Role, keys_of


def alike(marks: Sequence[CellMark], but: Collection[str]) -> list[list[CellMark]]:
    """Group cells that differ only in the keys `but`. Groups and cells keep the order of `marks`."""
    found: dict[bytes, list[CellMark]] = {}
    for mark in marks:
        rest = _without(msgspec.to_builtins(mark.cell.cell), but)
        found.setdefault(msgspec.json.encode(rest, order="sorted"), []).append(mark)
    return list(found.values())


def names(lines: Sequence[tuple[CellMark, Mapping[str, Any]]], but: Collection[str]) -> list[str]:
    """A unique label for each line, HTML-escaped.

    lines: for each line, one of its cells, and additional keys with values that its label shows. but: keys of the cell that no
    label shows.
    """
    return [html.escape(label, quote=False) for label in columns.labels(_rows(lines, but))]


def variants(lines: Sequence[tuple[CellMark, Mapping[str, Any]]], but: Collection[str]) -> list[str]:
    """For each line a name, HTML-escaped, that tells it apart from the lines of its strategy. lines, but: as in `names`."""
    return [html.escape(name, quote=False) for name in columns.variants(_rows(lines, but), "strategy")]


def _rows(lines: Sequence[tuple[CellMark, Mapping[str, Any]]], but: Collection[str]) -> list[CellRow]:
    cells = [_without(mark.row.cell, but) | {"gpus": mark.row.cell["gpus"]} | dict(said) for mark, said in lines]
    return [msgspec.structs.replace(mark.row, cell=cell) for (mark, _), cell in zip(lines, cells, strict=True)]


def _without(cell: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The cell without the keys of bookkeeping and without `keys`, which may be options (`options.NAME`)."""
    left_out = keys_of(Role.BOOKKEEPING).union(keys)
    kept = {key: value for key, value in cell.items() if key not in left_out}
    if "options" in kept:
        kept["options"] = {name: value for name, value in kept["options"].items() if f"options.{name}" not in left_out}
    return kept
