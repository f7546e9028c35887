"""Adapts a matrix to a cluster: the content of the nearest matrix file whose cells all fit, and the list of all changes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from jobs.adaptation import adapted_means
from jobs.adaptation.adapted_cells import AdaptedCell, adapt_cells, comes_from_axes
from jobs.adaptation.adapted_questions import QuestionError, Questions, list_changed_names, read_cell_values
from jobs.planning.resolve import Capacity
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.errors import InputError
from shardlab.matrix.matrix import Matrix
from shardlab.matrix.study import Deviation

ADAPTED_SUFFIX = "-adapted"  # the end of the name of an adapted matrix
LONGEST_NAME = 41  # the most characters of the name of an adapted matrix
NAMING_KEYS = ("workload", "strategy", "gpus", "nnodes")  # the keys by which a change names a cell that is left out


class Adaptation(msgspec.Struct, frozen=True):
    """An adapted matrix."""

    content: dict[str, Any]
    """The content of the adapted matrix file, as dicts and lists. Its key `deviations` lists the deviations of the original
    matrix, then the changes of this adaptation."""
    changes: list[Deviation]
    """The changes of this adaptation."""
    expected_hashes: set[str]
    """The hashes of the cells that the adapted matrix must have."""


def adapt_matrix(matrix: Matrix, machine: Capacity, plugins: OwnPlugins, cluster_name: str) -> Adaptation | None:
    """The nearest matrix that fits a cluster; None if the matrix fits as it is.

    machine: what the cluster can give to a run. plugins: the plug-ins of the workspace. cluster_name: the name of the cluster.
    Raises InputError if no cell fits, or if the matrix is not valid on any cluster.
    """
    original_matrix, matrix = matrix, adapted_means.replace_defaults(matrix, machine)
    adapted_cells = adapt_cells(matrix, machine, plugins, original_matrix)
    if matrix is original_matrix and all(cell.is_unchanged for cell in adapted_cells):
        return None
    expected_hashes = {cell.new_cell.hash() for cell in adapted_cells if cell.new_cell is not None}
    if not expected_hashes:
        raise InputError(
            f"{matrix.path}: no cell fits the cluster {cluster_name}, also not with fewer GPUs: {adapted_cells[0].why}."
        )
    new_content = copy.deepcopy(matrix.document.data)
    adapted_name = matrix.name.removesuffix(ADAPTED_SUFFIX)[: LONGEST_NAME - len(ADAPTED_SUFFIX)] + ADAPTED_SUFFIX
    new_content["name"] = adapted_name
    if matrix is not original_matrix:
        new_content["defaults"] = new_content["defaults"] | {
            matrix_key: value
            for matrix_key, value in matrix.file.defaults.items()
            if value != original_matrix.file.defaults[matrix_key]
        }
    staying_indexes = _find_staying_indexes(matrix, adapted_cells)
    new_content["exclude"] = [
        *new_content.get("exclude", []),
        *_make_exclude_entries(adapted_cells, staying_indexes, cluster_name),
    ]
    new_content["include"] = _make_include_entries(matrix, adapted_cells, staying_indexes, new_content.get("include", []))
    deviations = _list_cell_changes(adapted_cells) + _rewrite_questions(Questions(adapted_cells), matrix, new_content)
    if adapted_name != matrix.name:
        deviations.insert(
            0, Deviation("name", matrix.name, adapted_name, f"the matrix was adapted to the cluster {cluster_name}")
        )
    new_content["deviations"] = [*new_content.get("deviations", []), *map(_make_deviation_entry, deviations)]
    for matrix_key in ("exclude", "include"):
        if not new_content[matrix_key]:
            del new_content[matrix_key]
    return Adaptation(new_content, deviations, expected_hashes)


def _make_deviation_entry(change: Deviation) -> dict[str, Any]:
    """A change as an entry of `deviations` in the matrix file. If the change is not about cells, the key `cells` is left
    out."""
    deviation_entry: dict[str, Any] = msgspec.to_builtins(change)
    return {key: value for key, value in deviation_entry.items() if key != "cells" or value is not None}


def _find_staying_indexes(matrix: Matrix, adapted_cells: Sequence[AdaptedCell]) -> set[int]:
    """The indexes of the combinations that the adapted file still makes from its axes and zips, because their cells do not
    change.

    An unchanged combination does not stay if a new cell has the same values on the axes: the entry of the new cell in `include`
    would change this combination instead of adding a cell. So the unchanged cell gets an entry in `include` too.
    """
    unchanged_hashes = {cell.new_cell.hash() for cell in adapted_cells if cell.new_cell is not None and cell.is_unchanged}
    keys_of_new_cells = [
        cell.new_keys
        for cell in adapted_cells
        if cell.new_keys and cell.new_cell is not None and cell.new_cell.hash() not in unchanged_hashes
    ]
    new_axis_values = [{key: value for key, value in keys.items() if key in matrix.varying_keys} for keys in keys_of_new_cells]
    return {
        index
        for index, cell in enumerate(adapted_cells)
        if cell.is_unchanged
        and comes_from_axes(cell.point)
        and not any(all(cell.point.keys[key] == value for key, value in keys.items()) for keys in new_axis_values)
    }


def _make_exclude_entries(
    adapted_cells: Sequence[AdaptedCell], staying_indexes: set[int], cluster_name: str
) -> list[dict[str, Any]]:
    """Entries of `exclude` for the combinations of axes and zips that do not stay. If no combination with the same number of
    GPUs and nodes stays, one entry excludes all combinations of this size; otherwise each combination has its own entry."""
    cells_of_axes = {index: cell for index, cell in enumerate(adapted_cells) if comes_from_axes(cell.point)}
    exclude_entries: list[dict[str, Any]] = []
    for cell in (cell for index, cell in cells_of_axes.items() if index not in staying_indexes):
        point_keys = cell.point.keys
        size_keys: dict[str, Any] = {key: point_keys[key] for key in ("gpus", "nnodes") if key in point_keys}
        same_size_indexes = {
            other_index
            for other_index, other_cell in cells_of_axes.items()
            if all(other_cell.point.keys.get(key) == value for key, value in size_keys.items())
        }
        exclude_entry: dict[str, Any]
        if size_keys and not same_size_indexes & staying_indexes:
            exclude_entry = {
                **size_keys,
                "why": f"does not fit the cluster {cluster_name}, or is listed in `include`; see `deviations`",
            }
        else:
            varying_values = {
                key: point_keys[key] for key, key_path in cell.point.origin.items() if key_path[0] in ("axes", "zip")
            }
            why = "listed in `include`" if cell.is_unchanged else f"does not fit the cluster {cluster_name}: {cell.reason}"
            exclude_entry = {**varying_values, "why": why}
        if exclude_entry not in exclude_entries:
            exclude_entries.append(exclude_entry)
    return exclude_entries


def _make_include_entries(
    matrix: Matrix, adapted_cells: Sequence[AdaptedCell], staying_indexes: set[int], original_entries: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of `include`: first the entries of the original file that define an unchanged cell or add keys to a
    combination that stays, then an entry for each new cell.

    staying_indexes: the indexes of the combinations that stay. original_entries: the entries of `include` in the original file,
    with models as the file gives them."""
    # index of an entry of `include` that defines a cell -> this cell
    cells_by_entry = {
        _find_include_entry_index(matrix, cell): cell for cell in adapted_cells if not comes_from_axes(cell.point)
    }
    staying_points = [adapted_cells[index].point for index in staying_indexes]
    staying_points += [cell.point for cell in cells_by_entry.values() if cell.is_unchanged]
    include_entries = []
    for index, original_entry in enumerate(original_entries):
        defined_cell = cells_by_entry.get(index)
        # An entry that only added keys to combinations that do not stay is left out: it would become a cell, or be refused.
        if (
            defined_cell.is_unchanged
            if defined_cell is not None
            else any(matrix.entry_adds_to(index, point) for point in staying_points)
        ):
            include_entries.append(original_entry)
    covered_hashes = {
        cell.new_cell.hash()
        for index, cell in enumerate(adapted_cells)
        if cell.new_cell is not None and cell.is_unchanged and (index in staying_indexes or not comes_from_axes(cell.point))
    }
    model_entries = {
        model.name: {key: value for key, value in (("transformers", model.path), ("seq_len", model.seq_len)) if value}
        or {"torchvision": model.name}
        for model in matrix.models.values()
    }
    for cell in adapted_cells:
        if cell.new_keys is None or cell.new_cell is None or cell.new_cell.hash() in covered_hashes:
            continue
        covered_hashes.add(cell.new_cell.hash())
        searched_key = matrix.file.search.key if matrix.file.search is not None else None
        differing_values = {
            key: value
            for key, value in cell.new_keys.items()
            if key != searched_key
            and (key in matrix.varying_keys or key not in matrix.file.defaults or matrix.file.defaults[key] != value)
        }
        if "workload" in differing_values:
            differing_values["workload"] = model_entries.get(differing_values["workload"], differing_values["workload"])
        include_entries.append(differing_values or {"strategy": cell.new_keys["strategy"]})
    return include_entries


def _find_include_entry_index(matrix: Matrix, cell: AdaptedCell) -> int | None:
    """The index of the entry of `include` that defines this cell; None if no entry does."""
    indexes = (int(key_path[1]) for key_path in cell.point.origin.values() if key_path[0] == "include")
    return next((index for index in indexes if "when" not in matrix.file.include[index]), None)


def _list_cell_changes(adapted_cells: Sequence[AdaptedCell]) -> list[Deviation]:
    """The changes of cells: each value that changes, each kind of cell that is left out, and cells that became equal."""
    change_counts: Counter[tuple[str, Any, Any, str]] = Counter()
    left_out_counts: Counter[tuple[tuple[tuple[str, Any], ...], str]] = Counter()
    for cell in adapted_cells:
        old_values = read_cell_values(cell.original_cell)
        if cell.new_cell is None:
            value_names = [key for key in NAMING_KEYS if key != "nnodes" or key in cell.point.keys]
            left_out_counts[tuple((key, old_values[key]) for key in value_names), cell.why] += 1
            continue
        new_values, value_names = read_cell_values(cell.new_cell), list_changed_names(cell)
        default_reason = f"follows from gpus {new_values['gpus']} instead of {old_values['gpus']}"
        reasons = {"gpus": cell.why, "nnodes": cell.why} | {
            replaced_value.name: replaced_value.why for replaced_value in cell.replaced_values
        }
        for key in value_names:
            change_counts[key, old_values[key], new_values.get(key), reasons.get(key, default_reason)] += 1
    changes = [
        Deviation(key, old_values, new_values, why, count)
        for (key, old_values, new_values, why), count in change_counts.items()
    ]
    changes += [
        Deviation("cell", dict(naming_values), None, why, count) for (naming_values, why), count in left_out_counts.items()
    ]
    new_hashes = [cell.new_cell.hash() for cell in adapted_cells if cell.new_cell is not None]
    if len(set(new_hashes)) < len(new_hashes):
        why = "cells that are equal now run once"
        changes.append(Deviation("cells", len(new_hashes), len(set(new_hashes)), why, len(new_hashes) - len(set(new_hashes))))
    return changes


def _rewrite_questions(questions: Questions, matrix: Matrix, content: dict[str, Any]) -> list[Deviation]:
    """Rewrite the claims and reported numbers in the content of the file. Returns the changes."""
    deviations: list[Deviation] = []
    new_claims = []
    for claim, file_entry in zip(matrix.file.claims, content.get("claims", []), strict=True):
        try:
            new_test, difference_text = questions.rewrite_test(claim.test)
        except QuestionError as question_error:
            deviations.append(Deviation(f"claims.{claim.id}", claim.test, None, f"left out: {question_error}"))
            continue
        adapted_note = ", ".join(filter(None, (claim.adapted, difference_text)))
        new_claims.append({**file_entry, "test": new_test} | ({"adapted": adapted_note} if adapted_note else {}))
        if new_test != claim.test or difference_text:
            deviations.append(
                Deviation(f"claims.{claim.id}", claim.test, new_test, f"asked with {difference_text or 'the cells here'}")
            )
    reported_entries = []
    for reported_number, file_entry in zip(matrix.file.reported, content.get("reported", []), strict=True):
        try:
            new_cell_filter = questions.rewrite_filter(reported_number.cell)
            difference_clauses = questions.describe_differences(reported_number.cell)
            new_against_filter = questions.rewrite_filter(reported_number.against) if reported_number.against else {}
            difference_clauses += questions.describe_differences(reported_number.against) if reported_number.against else []
        except QuestionError as question_error:
            if questions.selects_no_new_cell(reported_number.cell):
                # the cell of this number is left out, and the report says that there is no such cell
                reported_entries.append(file_entry)
            else:
                deviations.append(
                    _make_number_deviation(
                        reported_number.where, reported_number.metric, reported_number.cell, None, f"left out: {question_error}"
                    )
                )
            continue
        adapted_note = ", ".join(dict.fromkeys(filter(None, (reported_number.adapted, *difference_clauses))))
        new_entry = (
            {**file_entry, "cell": new_cell_filter}
            | ({"against": new_against_filter} if new_against_filter else {})
            | ({"adapted": adapted_note} if adapted_note else {})
        )
        reported_entries.append(new_entry)
        if new_cell_filter != reported_number.cell or new_against_filter != reported_number.against or difference_clauses:
            why = f"compared with {', '.join(dict.fromkeys(difference_clauses)) or 'the cells here'}"
            deviations.append(
                _make_number_deviation(
                    reported_number.where, reported_number.metric, reported_number.cell, new_cell_filter, why
                )
            )
    for key, entries in (("claims", new_claims), ("reported", reported_entries)):
        content.pop(key, None)
        if entries:
            content[key] = entries
    return deviations


def _make_number_deviation(
    study_place: str, metric: str, old_filter: dict[str, Any], new_filter: dict[str, Any] | None, why: str
) -> Deviation:
    return Deviation(f"reported: {study_place}, {metric}", old_filter, new_filter, why)
