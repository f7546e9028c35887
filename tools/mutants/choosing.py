"""Chooses the tests that judge a mutant, and the order in which they run."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from copies import ROOT, WORK, product_digest, sources
from recording import place, test_files

if TYPE_CHECKING:
    from drawing import Mutant

# The limit of time for one mutant: tests are chosen in their order until the sum of their recorded times reaches this limit.
# The report says how many tests were left out.
BUDGET_S = 120.0
# Tests that read the source code of the product in place of running it: no order of a set gets out, and a unit is that of its
# value. They run for each mutant that survives the tests that run its line.
READING_FILES = ("tests/project/test_order_of_sets.py", "tests/project/test_units.py")
# The time that pytest needs to start. It is added to the time of the tests of a file when files are put in order.
START_S = 2.0


@dataclass(frozen=True)
class Batch:
    """The chosen tests of one test file with their recorded times in seconds, in the order in which they run."""

    file: str
    tests: dict[str, float]


@dataclass(frozen=True)
class Choice:
    """The tests that are chosen to judge a mutant.

    batches:  the tests by file, in the order in which they run
    left_out: number of tests that run the line but are not chosen, because the limit of time was used up
    how:      "line" if the tests run the line, "import" if the line runs when its file is imported
    """

    batches: list[Batch]
    left_out: int
    how: str


def read_killers() -> dict[str, list[str]]:
    """The tests that killed mutants, as `confirmed` and `unreliable` (see Recordings)."""
    try:
        return dict(json.loads(_killers().read_text()))
    except FileNotFoundError:
        return {"confirmed": [], "unreliable": []}


def _killers() -> Path:
    return WORK / product_digest() / "killers.json"


class Recordings:
    """The recordings of all test files together. A test that failed or was skipped when it was recorded is never chosen.

    confirmed:  tests that killed a mutant and then passed without a mutant
    unreliable: tests that killed a mutant but also failed without a mutant
    """

    def __init__(self) -> None:
        killers = read_killers()
        self.confirmed, self.unreliable = set(killers["confirmed"]), set(killers["unreliable"])
        self._names: list[str] = []
        self._seconds: list[float] = []
        # For each test: how many lines of the product it runs.
        self._breadth: Counter[int] = Counter()
        # For each file and line: the tests that run it. A set of tests is an integer: bit n is the test number n.
        self._lines: dict[str, dict[int, int]] = {}
        for test_file in test_files():
            if (kept := place(test_file)).exists():
                self._add(json.loads(kept.read_text()))

    def _add(self, recorded: dict[str, Any]) -> None:
        offset = len(self._names)
        passed = 0
        for number, (name, test) in enumerate(recorded["tests"].items()):
            self._names.append(name)
            self._seconds.append(test["seconds"])
            if test["outcome"] == "passed":
                passed |= 1 << number
        for file, lines in recorded["lines"].items():
            tests_of = self._lines.setdefault(file, {})
            for line, numbers in lines.items():
                tests = sum(1 << number for number in numbers if number >= 0) & passed
                tests_of[int(line)] = tests_of.get(int(line), 0) | tests << offset
                self._breadth.update(offset + number for number in numbers if number >= 0)

    def confirm(self, tests: Iterable[str]) -> None:
        self.confirmed |= set(tests)
        self._keep()

    def distrust(self, test: str) -> None:
        self.unreliable.add(test)
        self._keep()

    def _keep(self) -> None:
        _killers().write_text(json.dumps({"confirmed": sorted(self.confirmed), "unreliable": sorted(self.unreliable)}))

    def choose(self, mutant: Mutant) -> Choice:
        """Chooses the tests that judge a mutant.

        If the changed line is in the body of a function, these are the tests that run the line. Any other line runs when its
        file is imported, before every test. For such a line, the tests come in this order: those that run a line with the name
        that the changed statement defines, in this file or in a file that imports it; those that run a function of this file;
        those that run a function of a file that imports it; those during which the line itself ran.
        """
        lines = self._lines.get(mutant.file, {})
        span = range(mutant.line, mutant.end + 1)
        if mutant.line in bodies(mutant.file):
            return self._order([lines.get(mutant.at, 0) or self._union(mutant.file, span)], "line")
        own = self._union(mutant.file, bodies(mutant.file))
        uses = self._union(mutant.file, mentions(mutant.file, _defined(mutant)) & bodies(mutant.file))
        theirs = 0
        for file in importers(mutant.file):
            uses |= self._union(file, mentions(file, _defined(mutant)) & bodies(file))
            theirs |= self._union(file, bodies(file))
        return self._order([uses, own, theirs, self._union(mutant.file, span)], "import")

    def list_reading_tests(self) -> list[Batch]:
        """The tests of READING_FILES, without those that failed without a mutant."""
        seconds_by_name = dict(zip(self._names, self._seconds, strict=True))
        batches = []
        for file in READING_FILES:
            names = [name for name in self._names if name.startswith(f"{file}::") and name not in self.unreliable]
            batches.append(Batch(file, {name: seconds_by_name[name] for name in names}))
        return batches

    def _union(self, file: str, lines: Iterable[int]) -> int:
        tests_of = self._lines.get(file, {})
        union = 0
        for line in lines:
            union |= tests_of.get(line, 0)
        return union

    def _order(self, tiers: list[int], how: str) -> Choice:
        """Puts tests in order, tier by tier, and leaves out those for which there is no time.

        In a tier, a test comes the earlier the shorter it takes and the fewer other lines it runs: such a test looks closely at
        the lines that it does run. The tests of a file stay together.
        """
        batches: list[Batch] = []
        left_out, spent, done = 0, 0.0, 0
        for tier in tiers:
            chosen: dict[str, list[int]] = {}
            reliable = [number for number in _numbers(tier & ~done) if self._names[number] not in self.unreliable]
            for number in sorted(reliable, key=self._cost):
                spent += self._seconds[number]
                if spent > BUDGET_S and (batches or chosen):
                    left_out += 1
                else:
                    chosen.setdefault(self._names[number].partition("::")[0], []).append(number)
            done |= tier
            for file, numbers in sorted(chosen.items(), key=lambda item: self._mean_cost(item[1])):
                batches.append(Batch(file, {self._names[number]: self._seconds[number] for number in numbers}))
        return Choice(batches, left_out, how)

    def _cost(self, number: int) -> float:
        return (0.05 + self._seconds[number]) * self._breadth[number]

    def _mean_cost(self, numbers: list[int]) -> float:
        seconds = START_S + sum(self._seconds[number] for number in numbers)
        return seconds / len(numbers) * sum(self._breadth[number] for number in numbers) / len(numbers)


def _numbers(tests: int) -> list[int]:
    """The numbers of the tests in a set of tests."""
    return [number for number, bit in enumerate(reversed(f"{tests:b}")) if bit == "1"]


@cache
def bodies(file: str) -> frozenset[int]:
    """The lines of the bodies of all functions of a file. Its other lines run when it is imported."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(_tree(file)) if isinstance(node, functions)]
    return frozenset(line for node in nodes for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1))


def mentions(file: str, name: str) -> frozenset[int]:
    """The lines of a file that contain a name; none if the name is empty."""
    lines = enumerate((ROOT / file).read_text().splitlines(), 1)
    return frozenset(number for number, line in lines if name and re.search(rf"\b{name}\b", line))


def _defined(mutant: Mutant) -> str:
    """The name that the changed statement defines: of a constant, a field, a function or a class. "" if it defines none."""
    head = (ROOT / mutant.file).read_text().splitlines()[mutant.line - 1]
    match = re.match(r"\s*(?:(?:async )?def |class )?(\w+)(?:[:(, ]|$)", head)
    return match[1] if match else ""


@cache
def importers(file: str) -> list[str]:
    """The files of the product that import this file by its module name."""
    module = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
    return [other for other in sources() if other != file and module in _imports(other)]


@cache
def _imports(file: str) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return modules


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())
