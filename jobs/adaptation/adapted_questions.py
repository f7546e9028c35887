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
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.expression import MAX_LENGTH, Expression

# The values that are added to a filter if it would otherwise select too many cells. They are tried in this order.
EXTRA_FILTER_KEYS = tuple(dict.fromkeys(("nnodes", "gradient_accumulation_steps", "micro_batch_size", *cell_names.PLAIN_NAMES)))
# values of a cell that a reader sees as changed
SHOWN_KEYS = ("gpu_type", "environment", "launcher", "gpus", "nnodes", "tp", "pp", "global_batch_size")
NETWORK_METRIC_PREFIXES = ("network_", "rdma_", "pause_frames", "wire_")  # of metrics about links between nodes
ValuesByName = dict[str, Any]  # the values of a resolved cell, by name (shardlab.matrix.cell_names)


class SelectedCells(msgspec.Struct, frozen=True):
    """The cells that a filter of the original matrix selects."""

    cell_indexes: tuple[int, ...]
    """In the matrix."""
    adapted_cells: list[AdaptedCell]
    """What became of them."""

    @property
    def new_hashes(self) -> set[str]:
        """The hashes of the cells that took the place of these cells."""
        return {cell.new_cell.hash() for cell in self.adapted_cells if cell.new_cell is not None}

    @property
    def left_out_reason(self) -> str:
        """The reason why the first of these cells that has no new cell is left out; empty if all have a new cell."""
        return next((cell.resize_reason for cell in self.adapted_cells if cell.new_cell is None), "")


class QuestionError(Exception):
    """A question cannot be asked of the adapted cells. The text says why."""


class QuestionRewriter:
    """The cells of a matrix before and after its adaptation, as questions select them."""

    def __init__(self, adapted_cells: Sequence[AdaptedCell]) -> None:
        self.adapted_cells = list(adapted_cells)
        self.original_values = [read_cell_values(cell.original_cell) for cell in adapted_cells]
        self.new_values_by_hash = {
            cell.new_cell.hash(): read_cell_values(cell.new_cell) for cell in adapted_cells if cell.new_cell is not None
        }

    def select_cells(self, cell_filter: Mapping[str, Any]) -> SelectedCells:
        """The cells that a filter selects in the original matrix. cell_filter: the values of the filter, by name."""
        cell_indexes = tuple(
            index for index, cell_values in enumerate(self.original_values) if cell_names.has_values(cell_values, cell_filter)
        )
        return SelectedCells(cell_indexes, [self.adapted_cells[index] for index in cell_indexes])

    def rewrite_filter(self, cell_filter: Mapping[str, Any]) -> ValuesByName:
        """The filter that selects the new cells in place of the cells that `cell_filter` selects in the original matrix. Raises
        QuestionError."""
        selected_cells = self.select_cells(cell_filter)
        if selected_cells.left_out_reason:
            raise QuestionError(f"a cell is left out: {selected_cells.left_out_reason}")
        if not selected_cells.cell_indexes and self._find_new_hashes(cell_filter):
            raise QuestionError("it selected no cell of the study, and would select a cell of this matrix")
        if not selected_cells.cell_indexes:
            return dict(cell_filter)
        new_filter = {}
        for key in cell_filter:
            new_values = [self.new_values_by_hash[cell_hash].get(key) for cell_hash in selected_cells.new_hashes]
            if any(new_value != new_values[0] for new_value in new_values):
                raise QuestionError(f"its cells have different values of {key} here")
            new_filter[key] = new_values[0]
        if self._find_new_hashes(new_filter) == selected_cells.new_hashes:
            return new_filter
        for key in (key for key in EXTRA_FILTER_KEYS if key not in new_filter):
            narrower_filter = {**new_filter, key: self.new_values_by_hash[next(iter(selected_cells.new_hashes))].get(key)}
            if narrower_filter[key] is not None and self._find_new_hashes(narrower_filter) == selected_cells.new_hashes:
                return narrower_filter
        raise QuestionError("the values by which it selects cells select further cells here")

    def selects_no_new_cell(self, cell_filter: Mapping[str, Any]) -> bool:
        """Whether a filter of the original matrix selects no cell of the adapted matrix."""
        return not self._find_new_hashes(cell_filter)

    def describe_differences(self, cell_filter: Mapping[str, Any]) -> list[str]:
        """How the new cells differ from the cells that a filter selects in the original matrix, as clauses such as `gpus 4
        instead of 8`."""
        difference_clauses = []
        for cell in self.select_cells(cell_filter).adapted_cells:
            if cell.new_cell is not None:
                old_values, new_values = read_cell_values(cell.original_cell), read_cell_values(cell.new_cell)
                difference_clauses += [
                    f"{key} {new_values[key]} instead of {old_values[key]}"
                    for key in SHOWN_KEYS
                    if key in list_changed_value_names(cell)
                ]
        return list(dict.fromkeys(difference_clauses))

    def rewrite_test(self, test_text: str) -> tuple[str, str]:
        """The test of a claim for the new cells. Returns (the test, a text that says how the new cells differ from the cells of
        the study).

        Raises QuestionError if a filter cannot be rewritten, if cells that the claim compares became the same cell, or if the
        claim is about the network between nodes and all ranks of its new cells are on one node.
        """
        test_tree = ast.parse(test_text.strip(), mode="eval")
        difference_clauses: list[str] = []
        cell_indexes_by_hashes: dict[frozenset[str], tuple[int, ...]] = {}
        is_changed = False
        for metric_call in [node for node in ast.walk(test_tree) if isinstance(node, ast.Call)]:
            ((metric, call_arguments),) = Expression(
                ast.unparse(ast.Call(metric_call.func, [], metric_call.keywords))
            ).call_arguments
            cell_filter = {key: value for key, value in call_arguments.items() if key not in cell_names.METRIC_ARGUMENTS}
            new_filter, selected_cells = self.rewrite_filter(cell_filter), self.select_cells(cell_filter)
            if (
                cell_indexes_by_hashes.setdefault(frozenset(selected_cells.new_hashes), selected_cells.cell_indexes)
                != selected_cells.cell_indexes
            ):
                raise QuestionError("cells that it compares are the same cell here")
            node_count_pairs = {
                (cell.original_cell.nnodes, cell.new_cell.nnodes)
                for cell in selected_cells.adapted_cells
                if cell.new_cell is not None
            }
            if metric.startswith(NETWORK_METRIC_PREFIXES) and any(
                old_nodes > 1 == new_nodes for old_nodes, new_nodes in node_count_pairs
            ):
                raise QuestionError(f"{metric} is about the network between nodes, and its cells are on one node here")
            difference_clauses += self.describe_differences(cell_filter)
            if new_filter != cell_filter:
                is_changed = True
                arguments = {key: value for key, value in call_arguments.items() if key in cell_names.METRIC_ARGUMENTS}
                metric_call.keywords = [
                    ast.keyword(key.replace(".", "__"), ast.Constant(value)) for key, value in (new_filter | arguments).items()
                ]
        new_test = ast.unparse(test_tree) if is_changed else test_text
        if len(new_test) > MAX_LENGTH:
            raise QuestionError(f"its test would have more than {MAX_LENGTH} characters")
        return new_test, ", ".join(dict.fromkeys(difference_clauses))

    def _find_new_hashes(self, cell_filter: Mapping[str, Any]) -> set[str]:
        return {
            cell_hash
            for cell_hash, cell_values in self.new_values_by_hash.items()
            if cell_names.has_values(cell_values, cell_filter)
        }


def read_cell_values(cell: AnyCell) -> ValuesByName:
    """The values of a cell by name, as filters use them."""
    return cell_names.map_cell_values(msgspec.to_builtins(cell))


def list_changed_value_names(cell: AdaptedCell) -> list[str]:
    """The names of the values in which the new cell differs from the cell of the study. The number of nodes counts only if the
    matrix file gives it; otherwise the cluster decides this number."""
    if cell.new_cell is None:
        return []
    old_values, new_values = read_cell_values(cell.original_cell), read_cell_values(cell.new_cell)
    nnodes_is_given = "nnodes" in cell.point.keys
    return [key for key in old_values if new_values.get(key) != old_values[key] and (key != "nnodes" or nnodes_is_given)]
