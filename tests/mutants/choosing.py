"""Chooses the tests that judge a mutant, and the order in which they run."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from copies import ROOT, WORK, product_digest, sources
from drawing import Mutant
from recording import place, test_files

# The limit of time for one mutant: tests are chosen, the fastest first, until the sum of their recorded times reaches this
# limit. The report says how many tests were left out.
BUDGET_S = 180.0
# The time that pytest needs to start. It is added to the time of the tests of a file when files are sorted by their mean time
# per test.
START_S = 2.0


@dataclass(frozen=True)
class Batch:
    """The chosen tests of one test file with their recorded times in seconds, the fastest test first."""

    file: str
    tests: dict[str, float]

    @property
    def mean_s(self) -> float:
        return (START_S + sum(self.tests.values())) / len(self.tests)


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


class Recordings:
    """The recordings of all test files together. A test that failed or was skipped when it was recorded is never chosen.

    confirmed:  tests that killed a mutant and then passed without a mutant
    unreliable: tests that killed a mutant but also failed without a mutant
    """

    def __init__(self) -> None:
        self._kept = WORK / product_digest() / "killers.json"
        try:
            killers = json.loads(self._kept.read_text())
        except FileNotFoundError:
            killers = {"confirmed": [], "unreliable": []}
        self.confirmed, self.unreliable = set(killers["confirmed"]), set(killers["unreliable"])
        self._seconds: dict[str, float] = {}
        self._lines: dict[str, dict[int, set[str]]] = {}
        # (file, line) of lines that run when the file is imported, before any test
        self._imported: set[tuple[str, int]] = set()
        for test_file in test_files():
            kept = place(test_file)
            if not kept.exists():
                continue
            told = json.loads(kept.read_text())
            names = list(told["tests"])
            passed = {
                name: test["seconds"]
                for name, test in told["tests"].items()
                if test["outcome"] == "passed" and name not in self.unreliable
            }
            self._seconds |= passed
            for file, lines in told["lines"].items():
                known = self._lines.setdefault(file, {})
                for line, numbers in lines.items():
                    known.setdefault(int(line), set()).update(
                        names[number] for number in numbers if number >= 0 and names[number] in passed
                    )
                    if -1 in numbers:
                        self._imported.add((file, int(line)))

    def confirm(self, tests: Iterable[str]) -> None:
        self.confirmed |= set(tests)
        self._keep()

    def distrust(self, test: str) -> None:
        self.unreliable.add(test)
        self._keep()

    def _keep(self) -> None:
        self._kept.write_text(json.dumps({"confirmed": sorted(self.confirmed), "unreliable": sorted(self.unreliable)}))

    def choose(self, mutant: Mutant) -> Choice:
        """Chooses the tests that judge a mutant: the tests that run its line.

        A line that runs when its file is imported runs before every test. For such a line, the tests that run any other line of
        the file are chosen first, then the tests that run a line of another file that imports this file.
        """
        lines = self._lines.get(mutant.file, {})
        span = range(mutant.line, mutant.end + 1)
        if not any((mutant.file, line) in self._imported for line in (mutant.at, *span)):
            found = lines.get(mutant.at, set()) or self._union(mutant.file, span)
            return self._batches([found], "line")
        own = self._union(mutant.file, lines)
        theirs: set[str] = set()
        for file in _importers(mutant.file):
            theirs |= self._union(file, self._lines.get(file, {}))
        return self._batches([own, theirs - own], "import")

    def _union(self, file: str, lines: Iterable[int]) -> set[str]:
        known = self._lines.get(file, {})
        return set().union(*(known.get(line, set()) for line in lines))

    def _batches(self, tiers: list[set[str]], how: str) -> Choice:
        batches: list[Batch] = []
        left_out, spent = 0, 0.0
        for tier in tiers:
            chosen: dict[str, dict[str, float]] = {}
            for name in sorted(tier, key=lambda name: (self._seconds[name], name)):
                spent += self._seconds[name]
                if spent > BUDGET_S and batches + list(chosen):
                    left_out += 1
                else:
                    chosen.setdefault(name.split("::")[0], {})[name] = self._seconds[name]
            batches += sorted((Batch(file, tests) for file, tests in chosen.items()), key=lambda batch: batch.mean_s)
        return Choice(batches, left_out, how)


def _importers(file: str) -> list[str]:
    """The files of the product (its four packages) that import this file by its module name."""
    module = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
    return [other for other in sources() if other != file and module in _imports(other)]


_KNOWN: dict[str, set[str]] = {}


def _imports(file: str) -> set[str]:
    if file not in _KNOWN:
        found: set[str] = set()
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        _KNOWN[file] = found
    return _KNOWN[file]
