"""Checks that a matrix file with the key `search` has no other keys that contradict a search for a batch size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardlab.files.document import Document, KeyPath, Problem

# Keys that a cell must not have if its batch size is searched, each with the reason.
_REFUSED_KEYS = {
    "gpu_batch_size": "is searched (`search`). Allowed: either a value or a list here, or the search.",
    "global_batch_size": "follows from gpu_batch_size, which is searched (`search`). Allowed: leave global_batch_size out.",
    "micro_batch_size": (
        "would be the same in every try of the search, and with it the memory of a pass. Allowed: microbatches, the number of "
        "passes of a step, or neither."
    ),
    "epochs": "an epoch has fewer steps the larger the batch is, so tries of a search would differ in length. Allowed: steps.",
}


def find_search_problems(document: Document) -> list[Problem]:
    """A problem for each key of a matrix file that is not allowed together with `search`; none if the file has no search.

    document: the matrix file. The types of its values must have been checked before.
    """
    matrix_data: dict[str, Any] = document.data
    if matrix_data.get("search") is None:
        return []
    search_problems = []
    for section_path, key in _list_cell_keys(matrix_data):
        if key in _REFUSED_KEYS:
            search_problems.append(document.problem((*section_path, key), _REFUSED_KEYS[key], at_key=True))
    if matrix_data.get("claims") or matrix_data.get("reported"):
        key = "claims" if matrix_data.get("claims") else "reported"
        sentence = f"{key} name cells, and which cells a search runs is not known before it has run. Allowed: leave {key} out."
        search_problems.append(document.problem((key,), sentence, at_key=True))
    if matrix_data.get("retry"):
        sentence = "tries of a search are not started again by themselves. Allowed: leave retry out."
        search_problems.append(document.problem(("retry",), sentence, at_key=True))
    if isinstance(matrix_data.get("repeats"), dict):
        sentence = "a matrix with a search has no claims. Allowed: a number, how often each search is run from its start."
        search_problems.append(document.problem(("repeats",), sentence, at_key=True))
    return search_problems


def _list_cell_keys(matrix_data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yields (the path of the section that contains the key, the key) for each cell key in the matrix file."""
    yield from ((("defaults",), key) for key in matrix_data.get("defaults") or {})
    yield from ((("axes",), key) for key in matrix_data.get("axes") or {})
    for section in ("zip", "include"):
        yield from (((section, index), key) for index, entry in enumerate(matrix_data.get(section) or []) for key in entry)
