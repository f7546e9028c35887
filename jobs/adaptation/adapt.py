"""Adapts a matrix to a cluster: the content of the nearest matrix file whose cells all fit, and the list of all changes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from jobs.adaptation import adapted_means
from jobs.adaptation.adapted_cells import AdaptedCell, adapted_cells, is_crossed
from jobs.adaptation.adapted_questions import Cannot, Questions, changed_names, values
from jobs.planning.resolve import Capacity
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.errors import InputError
from shardlab.matrix.matrix import Matrix
from shardlab.matrix.study import Deviation

SUFFIX = "-adapted"  # the end of the name of an adapted matrix
LONGEST_NAME = 41  # the most characters of the name of an adapted matrix
NAMED = ("workload", "strategy", "gpus", "nnodes")  # the keys by which a change names a cell that is left out


class Adaptation(msgspec.Struct, frozen=True):
    """An adapted matrix.

    content: the content of the adapted matrix file, as dicts and lists. Its key `deviations` lists the deviations of the
    original matrix, then the changes of this adaptation. changes: the changes of this adaptation. expected: the hashes of the
    cells that the adapted matrix must have.
    """

    content: dict[str, Any]
    changes: list[Deviation]
    expected: set[str]


def adapt(asked: Matrix, machine: Capacity, own: OwnPlugins, cluster: str) -> Adaptation | None:
    """The nearest matrix that fits a cluster; None if the matrix fits as it is.

    machine: what the cluster can give to a run. own: the plug-ins of the workspace. cluster: the name of the cluster.
    Raises InputError if no cell fits, or if the matrix is not valid on any cluster.
    """
    study, asked = asked, adapted_means.with_defaults(asked, machine)
    adapted = adapted_cells(asked, machine, own, study)
    if asked is study and all(one.is_unchanged for one in adapted):
        return None
    kept = {one.after.hash() for one in adapted if one.after is not None}
    if not kept:
        raise InputError(f"{asked.path}: no cell fits the cluster {cluster}, also not with fewer GPUs: {adapted[0].why}.")
    content = copy.deepcopy(asked.document.data)
    name = asked.name.removesuffix(SUFFIX)[: LONGEST_NAME - len(SUFFIX)] + SUFFIX
    content["name"] = name
    if asked is not study:
        content["defaults"] = content["defaults"] | {
            key: value for key, value in asked.file.defaults.items() if value != study.file.defaults[key]
        }
    staying = _staying(asked, adapted)
    content["exclude"] = [*content.get("exclude", []), *_exclusions(adapted, staying, cluster)]
    content["include"] = _inclusions(asked, adapted, staying, content.get("include", []))
    changes = _of_cells(adapted) + _questions(Questions(adapted), asked, content)
    if name != asked.name:
        changes.insert(0, Deviation("name", asked.name, name, f"the matrix was adapted to the cluster {cluster}"))
    content["deviations"] = [*content.get("deviations", []), *map(_as_entry, changes)]
    for key in ("exclude", "include"):
        if not content[key]:
            del content[key]
    return Adaptation(content, changes, kept)


def _as_entry(change: Deviation) -> dict[str, Any]:
    """A change as an entry of `deviations` in the matrix file. If the change is not about cells, the key `cells` is left
    out."""
    entry: dict[str, Any] = msgspec.to_builtins(change)
    return {key: value for key, value in entry.items() if key != "cells" or value is not None}


def _staying(asked: Matrix, adapted: Sequence[AdaptedCell]) -> set[int]:
    """The indexes of the combinations that the adapted file still makes from its axes and zips, because their cells do not
    change.

    An unchanged combination does not stay if a new cell has the same values on the axes: the entry of the new cell in `include`
    would change this combination instead of adding a cell. So the unchanged cell gets an entry in `include` too.
    """
    there = {one.after.hash() for one in adapted if one.after is not None and one.is_unchanged}
    new = [one.keys for one in adapted if one.keys and one.after is not None and one.after.hash() not in there]
    wanted = [{key: value for key, value in keys.items() if key in asked.varying} for keys in new]
    return {
        number
        for number, one in enumerate(adapted)
        if one.is_unchanged
        and is_crossed(one.point)
        and not any(all(one.point.keys[key] == value for key, value in keys.items()) for keys in wanted)
    }


def _exclusions(adapted: Sequence[AdaptedCell], staying: set[int], cluster: str) -> list[dict[str, Any]]:
    """Entries of `exclude` for the combinations of axes and zips that do not stay. If no combination with the same number of
    GPUs and nodes stays, one entry excludes all combinations of this size; otherwise each combination has its own entry."""
    crossed = {number: one for number, one in enumerate(adapted) if is_crossed(one.point)}
    found: list[dict[str, Any]] = []
    for one in (one for number, one in crossed.items() if number not in staying):
        keys = one.point.keys
        size: dict[str, Any] = {key: keys[key] for key in ("gpus", "nnodes") if key in keys}
        alike = {n for n, two in crossed.items() if all(two.point.keys.get(key) == value for key, value in size.items())}
        entry: dict[str, Any]
        if size and not alike & staying:
            entry = {**size, "why": f"does not fit the cluster {cluster}, or is listed in `include`; see `deviations`"}
        else:
            varying = {key: keys[key] for key, place in one.point.origin.items() if place[0] in ("axes", "zip")}
            why = "listed in `include`" if one.is_unchanged else f"does not fit the cluster {cluster}: {one.reason}"
            entry = {**varying, "why": why}
        if entry not in found:
            found.append(entry)
    return found


def _inclusions(
    asked: Matrix, adapted: Sequence[AdaptedCell], staying: set[int], entries: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of `include`: first the entries of the original file that define an unchanged cell or add keys to a
    combination that stays, then an entry for each new cell.

    staying: the indexes of the combinations that stay. entries: the entries of `include` in the original file, with models as
    the file gives them.
    """
    # index of an entry of `include` that defines a cell -> this cell
    own_cells = {_entry(one): one for one in adapted if not is_crossed(one.point)}
    staying_points = [adapted[number].point for number in staying]
    kept = []
    for number, entry in enumerate(entries):
        own = own_cells.get(number)
        # If an entry only added keys to combinations that do not stay, it is left out: it would become a cell of its own.
        if own.is_unchanged if own is not None else any(asked.adds_to(number, point) for point in staying_points):
            kept.append(entry)
    there = {
        one.after.hash()
        for number, one in enumerate(adapted)
        if one.after is not None and one.is_unchanged and (number in staying or not is_crossed(one.point))
    }
    models = {
        model.name: {key: value for key, value in (("transformers", model.path), ("seq_len", model.seq_len)) if value}
        or {"torchvision": model.name}
        for model in asked.models.values()
    }
    for one in adapted:
        if one.keys is None or one.after is None or one.after.hash() in there:
            continue
        there.add(one.after.hash())
        searched = asked.file.search.key if asked.file.search is not None else None
        differing = {
            key: value
            for key, value in one.keys.items()
            if key != searched and (key in asked.varying or key not in asked.file.defaults or asked.file.defaults[key] != value)
        }
        if "workload" in differing:
            differing["workload"] = models.get(differing["workload"], differing["workload"])
        kept.append(differing or {"strategy": one.keys["strategy"]})
    return kept


def _entry(one: AdaptedCell) -> int | None:
    """The index of the entry of `include` that defines this cell; None if no entry does."""
    return next((int(path[1]) for path in one.point.origin.values() if path[0] == "include"), None)


def _of_cells(adapted: Sequence[AdaptedCell]) -> list[Deviation]:
    """The changes of cells: each value that changes, each kind of cell that is left out, and cells that became equal."""
    changed: Counter[tuple[str, Any, Any, str]] = Counter()
    left_out: Counter[tuple[tuple[tuple[str, Any], ...], str]] = Counter()
    for one in adapted:
        old = values(one.before)
        if one.after is None:
            names = [key for key in NAMED if key != "nnodes" or key in one.point.keys]
            left_out[tuple((key, old[key]) for key in names), one.why] += 1
            continue
        new, names = values(one.after), changed_names(one)
        because = f"follows from gpus {new['gpus']} instead of {old['gpus']}"
        whys = {"gpus": one.why, "nnodes": one.why} | {value.name: value.why for value in one.replaced}
        for key in names:
            changed[key, old[key], new.get(key), whys.get(key, because)] += 1
    found = [Deviation(key, old, new, why, count) for (key, old, new, why), count in changed.items()]
    found += [Deviation("cell", dict(named), None, why, count) for (named, why), count in left_out.items()]
    after = [one.after.hash() for one in adapted if one.after is not None]
    if len(set(after)) < len(after):
        why = "cells that are equal now run once"
        found.append(Deviation("cells", len(after), len(set(after)), why, len(after) - len(set(after))))
    return found


def _questions(questions: Questions, asked: Matrix, content: dict[str, Any]) -> list[Deviation]:
    """Rewrite the claims and reported numbers in the content of the file. Returns the changes."""
    changes: list[Deviation] = []
    claims = []
    for claim, entry in zip(asked.file.claims, content.get("claims", []), strict=True):
        try:
            test, differences = questions.test(claim.test)
        except Cannot as reason:
            changes.append(Deviation(f"claims.{claim.id}", claim.test, None, f"left out: {reason}"))
            continue
        said = ", ".join(filter(None, (claim.adapted, differences)))
        claims.append({**entry, "test": test} | ({"adapted": said} if said else {}))
        if test != claim.test or differences:
            changes.append(Deviation(f"claims.{claim.id}", claim.test, test, f"asked with {differences or 'the cells here'}"))
    reported = []
    for number, entry in zip(asked.file.reported, content.get("reported", []), strict=True):
        try:
            cell, clauses = questions.rewritten(number.cell), questions.differences(number.cell)
            against = questions.rewritten(number.against) if number.against else {}
            clauses += questions.differences(number.against) if number.against else []
        except Cannot as reason:
            if questions.is_free(number.cell):
                reported.append(entry)  # the cell of this number is left out, and the report says that there is no such cell
            else:
                changes.append(_reported(number.where, number.metric, number.cell, None, f"left out: {reason}"))
            continue
        said = ", ".join(dict.fromkeys(filter(None, (number.adapted, *clauses))))
        new = {**entry, "cell": cell} | ({"against": against} if against else {}) | ({"adapted": said} if said else {})
        reported.append(new)
        if cell != number.cell or against != number.against or clauses:
            why = f"compared with {', '.join(dict.fromkeys(clauses)) or 'the cells here'}"
            changes.append(_reported(number.where, number.metric, number.cell, cell, why))
    for key, entries in (("claims", claims), ("reported", reported)):
        content.pop(key, None)
        if entries:
            content[key] = entries
    return changes


def _reported(where: str, metric: str, cell: dict[str, Any], new: dict[str, Any] | None, why: str) -> Deviation:
    return Deviation(f"reported: {where}, {metric}", cell, new, why)
