"""Records once which tests run which lines of the product, and how long each test takes. Each test file runs in its own
process. Tests with the marker `e2e`, which take long, are left out."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import Queue

from copies import PACKAGES, ROOT, WORK, Copy, digest, end_group, now, product_digest, tracked

LIMIT_S = 3600
SETTINGS = """[run]
source =
    {sources}
data_file = {data}
parallel = true
sigterm = true
patch = _exit, execv
disable_warnings = no-data-collected, module-not-imported, module-not-measured, trace-changed, already-imported, couldnt-parse
"""


def test_files() -> list[str]:
    """The names of the test files, except files whose tests all have the marker `e2e`. Those of the trainers are last, because
    each of them imports torch."""
    names = [name for name in tracked() if re.fullmatch(r"tests/.*/test_\w+\.py", name)]
    light = [name for name in names if not re.search(r"^pytestmark = .*\be2e\b", (ROOT / name).read_text(), re.M)]
    return sorted(light, key=lambda name: (name.startswith("tests/trainers/"), name))


SHARED = "tests/conftest.py"


@cache
def _with_support(file: str) -> frozenset[str]:
    """A file of tests/ and the files `support_*.py` that it names, directly or through other files."""
    files, due = {file}, [file]
    while due:
        named = set(re.findall(r"\bsupport_\w+", (ROOT / due.pop()).read_text()))
        new = {f"tests/support/{name}.py" for name in named} & set(tracked()) - files
        files |= new
        due += new
    return frozenset(files)


def place(test_file: str) -> Path:
    """The file in which the recording of a test file is stored.

    A recording is valid for one state of the product, of the test file, of conftest.py and of the support files of both. Golden
    files do not count: a recording only says which lines a test runs.
    """
    files = digest(sorted(_with_support(test_file) | _with_support(SHARED)))
    return WORK / product_digest() / "recorded" / f"{Path(test_file).stem}-{files}.json"


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
    folder = copy.path / ".venv" / "recording"  # where the plugins look for the settings
    data = folder / "data"
    shutil.rmtree(folder, ignore_errors=True)
    data.mkdir(parents=True)
    data.chmod(0o1777)  # some tests start processes of other users
    (folder / "context").write_text("")
    sources = "\n    ".join(str(copy.path / package) for package in PACKAGES)
    (folder / "coveragerc").write_text(SETTINGS.format(sources=sources, data=data / "coverage"))
    with (data / "output").open("wb") as output:
        command = copy.command("record_contexts", test_file)
        process = subprocess.Popen(
            command, cwd=copy.path, env=copy.variables(), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{now()} {test_file}: not done after {LIMIT_S} s; its other tests judge nothing", file=sys.stderr)
            process.terminate()  # then coverage saves what it has measured
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        end_group(process, copy)
    told = (data / "output").read_text(errors="replace").strip().splitlines()[-1:]
    print(f"{now()} {test_file}: {''.join(told)}", file=sys.stderr)
    kept = place(test_file)
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_suffix(".part")
    beside.write_text(json.dumps(_read(copy, data)))
    beside.replace(kept)
    shutil.rmtree(folder)  # from now on, processes of this copy measure nothing
    copy.clean()


def _read(copy: Copy, data: Path) -> dict[str, object]:
    """Reads the files that coverage and the plugin record_contexts wrote for a test file. Returns a dict with two keys:

    tests: maps each test to its time and its outcome
    lines: maps each file and line to the numbers of the tests that run the line; -1 means that the line runs when the file is
    imported
    """
    import coverage  # here, because only `make mutants` installs it

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
