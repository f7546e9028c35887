"""Rewrites the questions of a matrix (claims and reported numbers) for its adapted cells.

A question selects cells by their values, as in `throughput_per_s(strategy='ddp', gpus=8)`. After the adaptation, the question
has to select the new cells in place of these cells. A question that cannot be asked any more is left out, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jobs.adaptation.adapted_cells import AdaptedCell
from shardlab.matrix import cell_names
from shardlab.matrix.cell import Cell
from shardlab.matrix.expression import MAX_LENGTH, Expression

# The values that are added to a filter if it would otherwise select too many cells. They are tried in this order.
FURTHER = tuple(dict.fromkeys(("nnodes", "gradient_accumulation_steps", "micro_batch_size", *cell_names.PLAIN)))
SHOWN = (
    "gpu_type",
    "launcher",
    "gpus",
    "nnodes",
    "tp",
    "pp",
    "global_batch_size",
)  # values of a cell that a reader sees as changed
BETWEEN_NODES = ("network_", "rdma_", "pause_frames", "wire_")  # metrics whose names begin so are about links between nodes
Values = dict[str, Any]  # the values of a resolved cell, by name (shardlab.matrix.cell_names)


class CellsBefore(msgspec.Struct, frozen=True):
    """The cells that a filter of the original matrix selects. numbers: their indexes in the matrix. adapted: what became of
    them."""

    numbers: tuple[int, ...]
    adapted: list[AdaptedCell]

    @property
    def after(self) -> set[str]:
        """The hashes of the cells that took the place of these cells."""
        return {one.after.hash() for one in self.adapted if one.after is not None}

    @property
    def left_out(self) -> str:
        """The reason why the first of these cells that has no new cell is left out; empty if all have a new cell."""
        return next((one.why for one in self.adapted if one.after is None), "")


class Cannot(Exception):
    """A question cannot be asked of the adapted cells. The text says why."""


class Questions:
    """The cells of a matrix before and after its adaptation, as questions select them."""

    def __init__(self, adapted: Sequence[AdaptedCell]) -> None:
        self.adapted = list(adapted)
        self.before = [values(one.before) for one in adapted]
        self.after = {one.after.hash(): values(one.after) for one in adapted if one.after is not None}

    def selected(self, wanted: Mapping[str, Any]) -> CellsBefore:
        """The cells that a filter selects in the original matrix. wanted: the values of the filter, by name."""
        numbers = tuple(number for number, known in enumerate(self.before) if cell_names.has(known, wanted))
        return CellsBefore(numbers, [self.adapted[number] for number in numbers])

    def rewritten(self, wanted: Mapping[str, Any]) -> Values:
        """The filter that selects the new cells in place of the cells that `wanted` selects in the original matrix. Raises
        Cannot."""
        chosen = self.selected(wanted)
        if chosen.left_out:
            raise Cannot(f"a cell is left out: {chosen.left_out}")
        if not chosen.numbers and self._now(wanted):
            raise Cannot("it selected no cell of the study, and would select a cell of this matrix")
        if not chosen.numbers:
            return dict(wanted)
        new = {}
        for key in wanted:
            having = [self.after[cell].get(key) for cell in chosen.after]
            if any(value != having[0] for value in having):
                raise Cannot(f"its cells have different values of {key} here")
            new[key] = having[0]
        if self._now(new) == chosen.after:
            return new
        for key in (key for key in FURTHER if key not in new):
            more = {**new, key: self.after[next(iter(chosen.after))].get(key)}
            if more[key] is not None and self._now(more) == chosen.after:
                return more
        raise Cannot("the values by which it selects cells select further cells here")

    def is_free(self, wanted: Mapping[str, Any]) -> bool:
        """Whether a filter of the original matrix selects no cell of the adapted matrix."""
        return not self._now(wanted)

    def differences(self, wanted: Mapping[str, Any]) -> list[str]:
        """How the new cells differ from the cells that a filter selects in the original matrix, as clauses such as `gpus 4
        instead of 8`."""
        found = []
        for one in self.selected(wanted).adapted:
            if one.after is not None:
                old, new = values(one.before), values(one.after)
                found += [f"{key} {new[key]} instead of {old[key]}" for key in SHOWN if key in changed_names(one)]
        return list(dict.fromkeys(found))

    def test(self, text: str) -> tuple[str, str]:
        """The test of a claim for the new cells. Returns (the test, a text that says how the new cells differ from the cells of
        the study).

        Raises Cannot if a filter cannot be rewritten, if cells that the claim compares became the same cell, or if the claim is
        about the network between nodes and all ranks of its new cells are on one node.
        """
        tree = ast.parse(text.strip(), mode="eval")
        differences: list[str] = []
        became: dict[frozenset[str], tuple[int, ...]] = {}
        is_changed = False
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            ((metric, given),) = Expression(ast.unparse(ast.Call(call.func, [], call.keywords))).filters
            wanted = {key: value for key, value in given.items() if key not in cell_names.ARGUMENTS}
            new, chosen = self.rewritten(wanted), self.selected(wanted)
            if became.setdefault(frozenset(chosen.after), chosen.numbers) != chosen.numbers:
                raise Cannot("cells that it compares are the same cell here")
            nodes = {(one.before.nnodes, one.after.nnodes) for one in chosen.adapted if one.after is not None}
            if metric.startswith(BETWEEN_NODES) and any(there > 1 == here for there, here in nodes):
                raise Cannot(f"{metric} is about the network between nodes, and its cells are on one node here")
            differences += self.differences(wanted)
            if new != wanted:
                is_changed = True
                arguments = {key: value for key, value in given.items() if key in cell_names.ARGUMENTS}
                call.keywords = [
                    ast.keyword(key.replace(".", "__"), ast.Constant(value)) for key, value in (new | arguments).items()
                ]
        test = ast.unparse(tree) if is_changed else text
        if len(test) > MAX_LENGTH:
            raise Cannot(f"its test would have more than {MAX_LENGTH} characters")
        return test, ", ".join(dict.fromkeys(differences))

    def _now(self, wanted: Mapping[str, Any]) -> set[str]:
        return {cell for cell, known in self.after.items() if cell_names.has(known, wanted)}


def values(cell: Cell) -> Values:
    """The values of a cell by name, as filters use them."""
    return cell_names.names(msgspec.to_builtins(cell))


def changed_names(one: AdaptedCell) -> list[str]:
    """The names of the values in which the new cell differs from the cell of the study. The number of nodes counts only if the
    matrix file gives it; otherwise the cluster decides this number."""
    if one.after is None:
        return []
    old, new = values(one.before), values(one.after)
    given = "nnodes" in one.point.keys
    return [key for key in old if new.get(key) != old[key] and (key != "nnodes" or given)]
