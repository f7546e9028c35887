"""Records once which tests run which lines of the product, and how long each test takes. Each test file runs in its own
process. Tests with the marker `e2e`, which take long, are left out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import Queue

import coverage
from copies import PACKAGES, WORK, Copy, digest, end_group, now, product_digest, tracked

LIMIT_S = 1500
SETTINGS = """[run]
source =
    {sources}
data_file = ${{MUTANTS_DATA}}
context = ${{MUTANTS_CONTEXT-}}
parallel = true
sigterm = true
patch = _exit, execv
disable_warnings = no-data-collected, module-not-imported, module-not-measured, trace-changed, already-imported, couldnt-parse
"""


def test_files() -> list[str]:
    """The names of all test files. Those of the trainers are last, because each of them imports torch."""
    found = [name for name in tracked() if name.startswith("tests/test_") and name.endswith(".py")]
    return sorted(found, key=lambda name: (name.startswith("tests/test_trainers"), name))


@cache
def _shared_digest() -> str:
    """The digest of the files that several test files share, such as conftest.py and the golden files."""
    shared = ("tests/support_", "tests/conftest", "tests/golden", "tests/recorded")
    return digest(name for name in tracked() if name.startswith(shared))


def place(test_file: str) -> Path:
    """The file in which the recording of a test file is stored.

    A recording is valid for one state of the product, of the test file and of the files that test files share.
    """
    return WORK / product_digest() / "recorded" / f"{Path(test_file).stem}-{digest([test_file])}-{_shared_digest()}.json"


def record(workers: int) -> None:
    """Records all test files that have no valid recording. workers: how many files are recorded at the same time."""
    due = [name for name in test_files() if not place(name).exists()]
    if not due:
        return
    print(f"{now()} records which lines the tests of {len(due)} files run", file=sys.stderr)
    copies: Queue[Copy] = Queue()
    made = [Copy.make(f"copy-{number}") for number in range(workers)]
    for copy in made:
        copies.put(copy)

    def one(test_file: str) -> None:
        copy = copies.get()
        try:
            _record(copy, test_file)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, due))
    for copy in made:
        copy.remove()


def _record(copy: Copy, test_file: str) -> None:
    data = copy.scratch / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    settings = data / "coveragerc"
    settings.write_text(SETTINGS.format(sources="\n    ".join(str(copy.path / package) for package in PACKAGES)))
    variables = copy.variables(
        COVERAGE_PROCESS_START=str(settings),
        MUTANTS_DATA=str(data / "coverage"),
        MUTANTS_CONTEXT="",
        MUTANTS_TESTS=str(data / "tests.json"),
    )
    with (data / "output").open("wb") as output:
        command = copy.command("record_contexts", test_file)
        process = subprocess.Popen(command, cwd=copy.path, env=variables, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{now()} {test_file}: not done after {LIMIT_S} s; its tests judge nothing", file=sys.stderr)
        end_group(process, copy)
    told = (data / "output").read_text(errors="replace").strip().splitlines()[-1:]
    print(f"{now()} {test_file}: {''.join(told)}", file=sys.stderr)
    kept = place(test_file)
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_suffix(".part")
    beside.write_text(json.dumps(_read(copy, data)))
    beside.replace(kept)
    copy.clean()


def _read(copy: Copy, data: Path) -> dict[str, object]:
    """Reads the files that coverage and the plugin record_contexts wrote for a test file. Returns a dict with two keys:

    tests: maps each test to its time and its outcome
    lines: maps each file and line to the numbers of the tests that run the line; -1 means that the line runs when the file is
    imported
    """
    if not (data / "tests.json").exists():
        return {"tests": {}, "lines": {}}
    told = json.loads((data / "tests.json").read_text())
    users: dict[str, list[int]] = {}
    for number, test in enumerate(told["tests"].values()):
        for key in test.pop("fixtures"):
            users.setdefault(told["fixtures"].get(key, ""), []).append(number)
    both = coverage.CoverageData(basename=str(data / "both"))
    for part in sorted(data.glob("coverage.*")):
        try:
            piece = coverage.CoverageData(basename=str(part))
            piece.read()
            both.update(piece)
        except coverage.CoverageException:
            continue  # the process that wrote this file was killed while it wrote
    lines: dict[str, dict[int, list[int]]] = {}
    for file in both.measured_files():
        found: dict[int, list[int]] = {}
        for line, contexts in both.contexts_by_lineno(file).items():
            numbers: set[int] = set()
            for context in contexts:
                if context.startswith("t"):
                    numbers.add(int(context[1:]))
                else:
                    numbers.update(users.get(context, ()) if context else (-1,))
            found[line] = sorted(numbers)
        lines[str(Path(file).relative_to(copy.path))] = found
    both.close()
    return {"tests": told["tests"], "lines": lines}
