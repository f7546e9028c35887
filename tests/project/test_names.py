"""Few names point at a thing instead of naming it: `found`, `one`, `there`. Their numbers in each package can only fall."""

import ast
from collections import Counter

import pytest

from tests.project.test_house import ROOMS, ROOT, SOURCES

POINTING_WORDS = {
    "about", "again", "alone", "among", "anew", "asked", "begins", "beside", "both", "each", "ends", "every", "found",
    "further", "given", "goes", "here", "how", "it", "kept", "known", "meant", "meanwhile", "mine", "more", "now", "of",
    "one", "own", "place_", "part_", "parts_", "said", "says", "seen", "several", "shown", "sort", "such", "taken",
    "that", "theirs", "them", "there", "these", "this", "those", "told", "used", "wanted", "way", "what", "why_",
    "without", "written",
}  # fmt: skip
# The largest numbers of (functions, parameters, variables and fields) of a package whose whole name is such a word.
# If a number has fallen, write the lower one here.
MOST = {
    "shardlab": (0, 0, 7),
    "templates": (0, 0, 0),
    "provision": (0, 0, 8),
    "jobs": (0, 0, 3),
    "trainers": (0, 0, 1),
    "collect": (0, 0, 14),
}


def pointing_names(text):
    """(kind, name, line) of each name in a source text that is a pointing word; `_found` counts like `found`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kind, name = "function", node.name
        elif isinstance(node, ast.arg):
            kind, name = "parameter", node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            kind, name = "variable", node.id
        else:
            continue
        if name.lstrip("_") in POINTING_WORDS:
            yield kind, name, node.lineno


def test_pointing_names_are_found():
    text = "def found(one):\n    _there = [such for such in one]\n    total: int = 0\n\n\nclass Kept:\n    own: str\n"
    names = [(kind, name) for kind, name, _ in pointing_names(text)]
    assert sorted(names) == [
        ("function", "found"), ("parameter", "one"), ("variable", "_there"), ("variable", "own"), ("variable", "such"),
    ]  # fmt: skip


@pytest.mark.parametrize("package", ROOMS)
def test_the_number_of_pointing_names_only_falls(package):
    counts, places = Counter(), []
    for path in SOURCES:
        file = path.relative_to(ROOT)
        if file.parts[0] == package:
            for kind, name, line in pointing_names(path.read_text()):
                counts[kind] += 1
                places.append(f"{file}:{line} {kind} {name}")
    numbers = tuple(counts[kind] for kind in ("function", "parameter", "variable"))
    assert numbers == MOST[package], "\n".join(places)
