"""The order of a set, or of the entries of a folder, never reaches a list, a text, a file or an action.

support_sets.py finds the places: a set or a list of entries must be sorted before its order matters.
"""

import ast
import functools

import pytest
import support_sets

from tests.project.test_house import ROOMS, ROOT, SOURCES

# (file, beginning of the code): why the order of this set does not matter.
ALLOWED = {
    ("collect/archiving/anonymous.py", "(*KEPT_WORDS, *words)"): "becomes a set",
    ("collect/archiving/anonymous.py", "{word: _make_standalone_pattern(word)"): "the patterns are joined the longest first",
    ("collect/archiving/anonymous.py", "{b'\"%b\"' % word"): "the patterns are joined the longest first",
    ("collect/figures/memory_parts.py", "{category: sum("): "the figure reads the categories by name, in a fixed order",
    ("collect/figures/operators.py", "for name in pair.cell_uses.keys() | "): "the names are sorted at the end",
    ("collect/findings/columns.py", "''.join(kinds)"): "is used only if there is one kind",
    ("collect/findings/trace_tables.py", "for name in cell_uses.keys() | "): "the caller sorts the differences",
    (
        "collect/traces/operators.py",
        "for kind, operator_name in run_uses.totals_by_name.keys() | ",
    ): "the differences are sorted at the end",
    ("jobs/adaptation/adapt.py", "[adapted_cells[index].point"): "used only with any()",
    (
        "jobs/adaptation/adapted_questions.py",
        "[self.new_values_by_hash[cell_hash]",
    ): "different values are refused, so the first is any of them",
    ("jobs/adaptation/adapted_questions.py", "iter(selected_cells.new_hashes)"): "its value is used only if all cells have it",
    ("jobs/planning/plan_predictions.py", "{gpu_type: planned_machine"): "the machines are read by name",
    (
        "jobs/ssh/record_mirror.py",
        "for removed_name in self._positions.keys() - ",
    ): "the files are removed one by one in any order",
    (
        "jobs/supervisor/hold.py",
        "for scheduler_name in {run.scheduler for run in runs}",
    ): "the schedulers release their own runs in any order",
    (
        "jobs/verbs/archived_matrix.py",
        "[path for path in Path(archive_folder).rglob",
    ): "the files are read by name and written in any order",
    ("provision/checks/_prove_node.py", "list(folder.glob(name_pattern))"): "the paths are counted, and their names are sorted",
    ("provision/checks/_prove_node.py", "(path.name.partition"): "any other node will do: the interface to it is wanted",
    ("provision/practice/machine.py", "for process_folder in Path('/proc')"): "one process at most is the process 1 of a node",
    ("provision/providers/virtual.py", "[folder.name for folder in STATE_FOLDER.iterdir()"): "the machines are counted",
    ("trainers/parallel/fsdp.py", "{policies}"): "a message of an assertion",
    ("trainers/rehearsal/depths.py", "for op, group_size in {(call.op, call.ranks)"): "the collectives are sorted at the end",
}


@functools.cache
def trees():
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}


@functools.cache
def names():
    return support_sets.set_names(trees().values())


@functools.cache
def places(package):
    """(file, code) of each place in a package where the order of a set matters."""
    files = {file: tree for file, tree in trees().items() if file.startswith(f"{package}/")}
    return {(file, code) for file, tree in files.items() for _, code in support_sets.Reader(tree, *names()).places()}


@pytest.mark.parametrize("package", ROOMS)
def test_no_order_of_a_set_gets_out(package):
    def is_allowed(file, code):
        return any(file == allowed_file and code.startswith(start) for allowed_file, start in ALLOWED)

    assert sorted(place for place in places(package) if not is_allowed(*place)) == []
    unused = [
        key
        for key in ALLOWED
        if key[0].startswith(f"{package}/") and not any(code.startswith(key[1]) for _, code in places(package))
    ]
    assert unused == [], "an exception is not needed any more"


WRONG = [
    "x = list({a, b})",
    "x = tuple(set(a))",
    "x = ', '.join(a.keys() - b.keys())",
    "x = ', '.join({c.name for c in a})",
    "x = ', '.join(str(c) for c in {a, b})",
    "x = [c for c in set(a) | set(b)]",
    "x = [*a, *frozenset(b)]",
    "x = {c: 1 for c in {a, b}}",
    "x = dict.fromkeys({a, b})",
    "x = f'{ {a, b} }'",
    "def f(a: set[str]):\n    for b in a:\n        print_line(b)",
    "def f(a: frozenset[str]):\n    for b in a:\n        yield b",
    "def f():\n    a = {b, c}\n    return list(a)",
    "def f():\n    a = {b, c}\n    return a.pop()",
    "def f() -> set[str]: ...\nx = list(f())",
    "class A:\n    b: set[str]\nx = [c for c in a.b]",
    "x = max({a, b}, key=len)",
    "x = [c for c in a.iterdir()]",
    "x = ', '.join(os.listdir(a))",
]
RIGHT = [
    "x = sorted({a, b})",
    "x = ', '.join(sorted(a.keys() - b.keys()))",
    "x = {c for c in {a, b}}",
    "x = sorted(a.glob('*'))",
    "a = [c for c in os.listdir(b)]\nx = sorted(a)",
    "x = any(c for c in {a, b})",
    "x = sorted(c.name for c in set(a))",
    "x = sorted(map(f, {a, b}))",
    "x = {*{a, b}, c}",
    "x = [c for c in a.keys()]",
    "x = [c for c in a if c in {1, 2}]",
    "def f(a: set[str]):\n    for b in a:\n        c.add(b)",
    "def f():\n    a = {b, c}\n    return a.pop() if len(a) == 1 else None",
    "def f() -> list[str]: ...\nx = list(f())",
]


@pytest.mark.parametrize("text", WRONG)
def test_code_that_lets_the_order_of_a_set_out_is_found(text):
    assert len({code for _, code in found(text)}) == 1


@pytest.mark.parametrize("text", RIGHT)
def test_code_in_which_no_order_gets_out_is_not_found(text):
    assert found(text) == []


def found(text):
    tree = ast.parse(text)
    return list(support_sets.Reader(tree, *support_sets.set_names([tree])).places())
