"""Adapts a matrix to a cluster: the content of the nearest matrix file whose cells all fit, and the list of all changes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from jobs.adaptation import adapted_means
from jobs.adaptation.adapted_cells import AdaptedCell, adapt_cells, comes_from_axes
from jobs.adaptation.adapted_questions import QuestionError, Questions, list_changed_names, named_values
from jobs.planning.resolve import Capacity
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.errors import InputError
from shardlab.matrix.matrix import Matrix
from shardlab.matrix.study import Deviation

SUFFIX = "-adapted"  # the end of the name of an adapted matrix
LONGEST_NAME = 41  # the most characters of the name of an adapted matrix
NAMING_KEYS = ("workload", "strategy", "gpus", "nnodes")  # the keys by which a change names a cell that is left out


class Adaptation(msgspec.Struct, frozen=True):
    """An adapted matrix."""

    content: dict[str, Any]
    """The content of the adapted matrix file, as dicts and lists. Its key `deviations` lists the deviations of the original
    matrix, then the changes of this adaptation."""
    changes: list[Deviation]
    """The changes of this adaptation."""
    expected: set[str]
    """The hashes of the cells that the adapted matrix must have."""


def adapt_matrix(matrix: Matrix, machine: Capacity, plugins: OwnPlugins, cluster_name: str) -> Adaptation | None:
    """The nearest matrix that fits a cluster; None if the matrix fits as it is.

    machine: what the cluster can give to a run. plugins: the plug-ins of the workspace. cluster_name: the name of the cluster.
    Raises InputError if no cell fits, or if the matrix is not valid on any cluster.
    """
    study, matrix = matrix, adapted_means.replace_defaults(matrix, machine)
    adapted = adapt_cells(matrix, machine, plugins, study)
    if matrix is study and all(cell.is_unchanged for cell in adapted):
        return None
    expected_hashes = {cell.after.hash() for cell in adapted if cell.after is not None}
    if not expected_hashes:
        raise InputError(f"{matrix.path}: no cell fits the cluster {cluster_name}, also not with fewer GPUs: {adapted[0].why}.")
    content = copy.deepcopy(matrix.document.data)
    name = matrix.name.removesuffix(SUFFIX)[: LONGEST_NAME - len(SUFFIX)] + SUFFIX
    content["name"] = name
    if matrix is not study:
        content["defaults"] = content["defaults"] | {
            key: value for key, value in matrix.file.defaults.items() if value != study.file.defaults[key]
        }
    staying_indexes = _find_staying_indexes(matrix, adapted)
    content["exclude"] = [*content.get("exclude", []), *_make_exclude_entries(adapted, staying_indexes, cluster_name)]
    content["include"] = _make_include_entries(matrix, adapted, staying_indexes, content.get("include", []))
    changes = _list_cell_changes(adapted) + _rewrite_questions(Questions(adapted), matrix, content)
    if name != matrix.name:
        changes.insert(0, Deviation("name", matrix.name, name, f"the matrix was adapted to the cluster {cluster_name}"))
    content["deviations"] = [*content.get("deviations", []), *map(_make_deviation_entry, changes)]
    for key in ("exclude", "include"):
        if not content[key]:
            del content[key]
    return Adaptation(content, changes, expected_hashes)


def _make_deviation_entry(change: Deviation) -> dict[str, Any]:
    """A change as an entry of `deviations` in the matrix file. If the change is not about cells, the key `cells` is left
    out."""
    entry: dict[str, Any] = msgspec.to_builtins(change)
    return {key: value for key, value in entry.items() if key != "cells" or value is not None}


def _find_staying_indexes(matrix: Matrix, adapted: Sequence[AdaptedCell]) -> set[int]:
    """The indexes of the combinations that the adapted file still makes from its axes and zips, because their cells do not
    change.

    An unchanged combination does not stay if a new cell has the same values on the axes: the entry of the new cell in `include`
    would change this combination instead of adding a cell. So the unchanged cell gets an entry in `include` too.
    """
    unchanged = {cell.after.hash() for cell in adapted if cell.after is not None and cell.is_unchanged}
    new_keys = [cell.keys for cell in adapted if cell.keys and cell.after is not None and cell.after.hash() not in unchanged]
    new_axis_values = [{key: value for key, value in keys.items() if key in matrix.varying_keys} for keys in new_keys]
    return {
        index
        for index, cell in enumerate(adapted)
        if cell.is_unchanged
        and comes_from_axes(cell.point)
        and not any(all(cell.point.keys[key] == value for key, value in keys.items()) for keys in new_axis_values)
    }


def _make_exclude_entries(adapted: Sequence[AdaptedCell], staying_indexes: set[int], cluster_name: str) -> list[dict[str, Any]]:
    """Entries of `exclude` for the combinations of axes and zips that do not stay. If no combination with the same number of
    GPUs and nodes stays, one entry excludes all combinations of this size; otherwise each combination has its own entry."""
    cells = {number: cell for number, cell in enumerate(adapted) if comes_from_axes(cell.point)}
    entries: list[dict[str, Any]] = []
    for cell in (cell for number, cell in cells.items() if number not in staying_indexes):
        keys = cell.point.keys
        size: dict[str, Any] = {key: keys[key] for key in ("gpus", "nnodes") if key in keys}
        same_size = {n for n, other in cells.items() if all(other.point.keys.get(key) == value for key, value in size.items())}
        entry: dict[str, Any]
        if size and not same_size & staying_indexes:
            entry = {**size, "why": f"does not fit the cluster {cluster_name}, or is listed in `include`; see `deviations`"}
        else:
            varying = {key: keys[key] for key, path in cell.point.origin.items() if path[0] in ("axes", "zip")}
            why = "listed in `include`" if cell.is_unchanged else f"does not fit the cluster {cluster_name}: {cell.reason}"
            entry = {**varying, "why": why}
        if entry not in entries:
            entries.append(entry)
    return entries


def _make_include_entries(
    matrix: Matrix, adapted: Sequence[AdaptedCell], staying_indexes: set[int], entries: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of `include`: first the entries of the original file that define an unchanged cell or add keys to a
    combination that stays, then an entry for each new cell.

    staying_indexes: the indexes of the combinations that stay. entries: the entries of `include` in the original file, with
    models as the file gives them."""
    # index of an entry of `include` that defines a cell -> this cell
    cells_by_entry = {_include_entry_index(cell): cell for cell in adapted if not comes_from_axes(cell.point)}
    staying_points = [adapted[index].point for index in staying_indexes]
    include_entries = []
    for index, entry in enumerate(entries):
        origin = cells_by_entry.get(index)
        # If an entry only added keys to combinations that do not stay, it is left out: it would become a cell of its own.
        if origin.is_unchanged if origin is not None else any(matrix.entry_adds_to(index, point) for point in staying_points):
            include_entries.append(entry)
    covered_hashes = {
        cell.after.hash()
        for index, cell in enumerate(adapted)
        if cell.after is not None and cell.is_unchanged and (index in staying_indexes or not comes_from_axes(cell.point))
    }
    models = {
        model.name: {key: value for key, value in (("transformers", model.path), ("seq_len", model.seq_len)) if value}
        or {"torchvision": model.name}
        for model in matrix.models.values()
    }
    for cell in adapted:
        if cell.keys is None or cell.after is None or cell.after.hash() in covered_hashes:
            continue
        covered_hashes.add(cell.after.hash())
        searched_key = matrix.file.search.key if matrix.file.search is not None else None
        differing = {
            key: value
            for key, value in cell.keys.items()
            if key != searched_key
            and (key in matrix.varying_keys or key not in matrix.file.defaults or matrix.file.defaults[key] != value)
        }
        if "workload" in differing:
            differing["workload"] = models.get(differing["workload"], differing["workload"])
        include_entries.append(differing or {"strategy": cell.keys["strategy"]})
    return include_entries


def _include_entry_index(cell: AdaptedCell) -> int | None:
    """The index of the entry of `include` that defines this cell; None if no entry does."""
    return next((int(path[1]) for path in cell.point.origin.values() if path[0] == "include"), None)


def _list_cell_changes(adapted: Sequence[AdaptedCell]) -> list[Deviation]:
    """The changes of cells: each value that changes, each kind of cell that is left out, and cells that became equal."""
    change_counts: Counter[tuple[str, Any, Any, str]] = Counter()
    left_out: Counter[tuple[tuple[tuple[str, Any], ...], str]] = Counter()
    for cell in adapted:
        old = named_values(cell.before)
        if cell.after is None:
            names = [key for key in NAMING_KEYS if key != "nnodes" or key in cell.point.keys]
            left_out[tuple((key, old[key]) for key in names), cell.why] += 1
            continue
        new, names = named_values(cell.after), list_changed_names(cell)
        default_reason = f"follows from gpus {new['gpus']} instead of {old['gpus']}"
        reasons = {"gpus": cell.why, "nnodes": cell.why} | {value.name: value.why for value in cell.replaced}
        for key in names:
            change_counts[key, old[key], new.get(key), reasons.get(key, default_reason)] += 1
    changes = [Deviation(key, old, new, why, count) for (key, old, new, why), count in change_counts.items()]
    changes += [Deviation("cell", dict(named), None, why, count) for (named, why), count in left_out.items()]
    new_hashes = [cell.after.hash() for cell in adapted if cell.after is not None]
    if len(set(new_hashes)) < len(new_hashes):
        why = "cells that are equal now run once"
        changes.append(Deviation("cells", len(new_hashes), len(set(new_hashes)), why, len(new_hashes) - len(set(new_hashes))))
    return changes


def _rewrite_questions(questions: Questions, matrix: Matrix, content: dict[str, Any]) -> list[Deviation]:
    """Rewrite the claims and reported numbers in the content of the file. Returns the changes."""
    changes: list[Deviation] = []
    claims = []
    for claim, entry in zip(matrix.file.claims, content.get("claims", []), strict=True):
        try:
            test, differences = questions.test(claim.test)
        except QuestionError as reason:
            changes.append(Deviation(f"claims.{claim.id}", claim.test, None, f"left out: {reason}"))
            continue
        note = ", ".join(filter(None, (claim.adapted, differences)))
        claims.append({**entry, "test": test} | ({"adapted": note} if note else {}))
        if test != claim.test or differences:
            changes.append(Deviation(f"claims.{claim.id}", claim.test, test, f"asked with {differences or 'the cells here'}"))
    reported = []
    for number, entry in zip(matrix.file.reported, content.get("reported", []), strict=True):
        try:
            cell, clauses = questions.rewrite_filter(number.cell), questions.describe_differences(number.cell)
            against = questions.rewrite_filter(number.against) if number.against else {}
            clauses += questions.describe_differences(number.against) if number.against else []
        except QuestionError as reason:
            if questions.is_free(number.cell):
                reported.append(entry)  # the cell of this number is left out, and the report says that there is no such cell
            else:
                changes.append(_reported_change(number.where, number.metric, number.cell, None, f"left out: {reason}"))
            continue
        note = ", ".join(dict.fromkeys(filter(None, (number.adapted, *clauses))))
        new = {**entry, "cell": cell} | ({"against": against} if against else {}) | ({"adapted": note} if note else {})
        reported.append(new)
        if cell != number.cell or against != number.against or clauses:
            why = f"compared with {', '.join(dict.fromkeys(clauses)) or 'the cells here'}"
            changes.append(_reported_change(number.where, number.metric, number.cell, cell, why))
    for key, entries in (("claims", claims), ("reported", reported)):
        content.pop(key, None)
        if entries:
            content[key] = entries
    return changes


def _reported_change(study_place: str, metric: str, cell: dict[str, Any], new: dict[str, Any] | None, why: str) -> Deviation:
    return Deviation(f"reported: {study_place}, {metric}", cell, new, why)
