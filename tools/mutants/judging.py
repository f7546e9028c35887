"""Judges each mutant: runs the tests that run the changed line (except tests with the marker `e2e`), then those that read the
source code, and records whether a test fails.

Each result is written to its own file, so that an interrupted `make mutants` can continue where it stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

from choosing import START_S, Batch, Recordings
from copies import WORK, Copy, end_group, now, product_digest, tests_digest
from drawing import Mutant

KILLED, TIMEOUT, SURVIVED, UNCOVERED = "killed", "timeout", "survived", "uncovered"
# A test hangs if it takes longer than this time plus ten times its recorded time. If the machine is busy with other work, this
# limit is multiplied by the load per processor.
HANGS_S = 60.0
# The tests of this number of files run in a first process, which kills most mutants. The tests of all other files run in a
# second process, and those that read the source code in a third.
FIRST_FILES = 2


@dataclass(frozen=True)
class Result:
    """The result of judging a mutant.

    outcome:    killed, timeout (killed because a test did not end), survived, or uncovered (no test without the marker `e2e`
                runs the changed line)
    killer:     the test that failed or did not end
    judges:     number of tests that were chosen to judge the mutant
    left_out:   number of tests that run the line but were not chosen, because the limit of time was used up
    how:        "line", or "import" if the line runs when its file is imported
    tests:      digest of the tests (copies.tests_digest) when the mutant was judged
    seconds:    the time that the tests took
    """

    outcome: str
    killer: str
    judges: int
    left_out: int
    how: str
    tests: str
    seconds: float

    @property
    def is_killed(self) -> bool:
        return self.outcome in (KILLED, TIMEOUT)


def place(mutant: Mutant) -> Path:
    """The file in which the result of a mutant is stored."""
    return WORK / product_digest() / "results" / f"{mutant.name}.json"


def known(mutant: Mutant) -> Result | None:
    """The stored result of a mutant if the result is still valid, else None.

    The result "killed" is valid as long as the product does not change. The result "survived" is valid only as long as the
    tests do not change either.
    """
    try:
        result = Result(**json.loads(place(mutant).read_text()))
    except FileNotFoundError:
        return None
    return result if result.is_killed or result.tests == tests_digest() else None


def judge(mutants: list[Mutant], recordings: Recordings, workers: int, tests: str) -> None:
    """Judges all mutants that have no valid result. workers: how many mutants are judged at the same time. tests: the digest of
    the tests."""
    due = [mutant for mutant in mutants if known(mutant) is None]
    print(f"{now()} judges {len(due)} of {len(mutants)} mutants", file=sys.stderr)
    copies: Queue[Copy] = Queue()
    made = [Copy.make(f"judge-{number}") for number in range(workers)] if due else []
    for copy in made:
        copies.put(copy)

    def one(numbered: tuple[int, Mutant]) -> None:
        number, mutant = numbered
        copy = copies.get()
        try:
            result = _judge(copy, mutant, recordings, number + 1, tests)
        finally:
            copies.put(copy)
        kept = place(mutant)
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(".part")
        beside.write_text(json.dumps(asdict(result), indent=1) + "\n")
        beside.replace(kept)
        print(f"{now()} {number + 1}/{len(due)} {mutant.file}:{mutant.at} {result.outcome} {result.killer}", file=sys.stderr)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, enumerate(due)))
    for copy in made:
        copy.remove()


def _judge(copy: Copy, mutant: Mutant, recordings: Recordings, number: int, tests: str) -> Result:
    choice = recordings.choose(mutant)
    judges = sum(len(batch.tests) for batch in choice.batches)
    begun = time.monotonic()
    outcome, killer = SURVIVED if judges else UNCOVERED, ""
    with _InPlace(copy, mutant, number):
        for batches in (choice.batches[:FIRST_FILES], choice.batches[FIRST_FILES:], recordings.list_reading_tests()):
            if batches and (ended := _run(copy, batches))[0] != SURVIVED:
                outcome, killer = ended
                break
    return Result(outcome, killer, judges, choice.left_out, choice.how, tests, round(time.monotonic() - begun, 1))


def confirm(mutants: list[Mutant], recordings: Recordings) -> bool:
    """Runs the tests that killed mutants once more, on the code without a mutant.

    If a test also fails without a mutant (for example because the machine is busy), its failures do not prove that it detects
    mutants. Then the results of the mutants that the test killed are deleted, and the test is not used any more. Returns
    whether some mutants must be judged again.
    """
    kills: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        result = known(mutant)
        if result is not None and result.is_killed and result.killer not in recordings.confirmed:
            kills.setdefault(result.killer, []).append(mutant)
    files: dict[str, list[str]] = {}
    for killer in kills:
        files.setdefault(killer.split("::")[0], []).append(killer)
    print(f"{now()} runs the {len(kills)} tests that killed without a mutant", file=sys.stderr)
    copy = Copy.make("judge-0")
    for file, killers in files.items():
        named = dict.fromkeys(killers, 0.0)  # a killer may be a file whose import failed; then this run only imports the file
        while named and (ended := _run(copy, [Batch(file, named)]))[0] != SURVIVED:
            if "::" not in ended[1]:
                raise RuntimeError(f"{file} cannot be run without a mutant: {ended[1]}")
            named.pop(ended[1])
            recordings.distrust(ended[1])
            for mutant in kills[ended[1]]:
                place(mutant).unlink()
            print(f"{now()} fails without a mutant: {ended[1]}", file=sys.stderr)
        recordings.confirm(named)
    copy.remove()
    return any(known(mutant) is None for mutant in mutants)


class _InPlace:
    """A context in which a file of a copy contains a mutant. At its end, the original file is restored.

    Each mutant gives the file another modification time (mtime), because Python uses cached bytecode if the mtime and the size
    of a source file are unchanged.
    """

    def __init__(self, copy: Copy, mutant: Mutant, number: int) -> None:
        self._path = copy.path / mutant.file
        self._mutant, self._number = mutant, number

    def __enter__(self) -> None:
        self._before, self._stat = self._path.read_text(), self._path.stat()
        self._path.write_text(self._mutant.changed())
        seconds = int(self._stat.st_mtime) + self._number
        os.utime(self._path, (seconds, seconds))

    def __exit__(self, *_: object) -> None:
        self._path.write_text(self._before)
        os.utime(self._path, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns))


def _run(copy: Copy, batches: list[Batch]) -> tuple[str, str]:
    """Runs tests until a test fails. Returns (outcome, the test that failed or the test file whose import failed)."""
    seconds = {name: took for batch in batches for name, took in batch.tests.items()}
    chosen, running = copy.scratch / "chosen.json", copy.scratch / "running"
    failed = running.with_suffix(".failed")
    chosen.write_text(json.dumps(list(seconds)))
    for path in (running, failed):
        path.unlink(missing_ok=True)
    variables = copy.variables(MUTANTS_CHOSEN=str(chosen), MUTANTS_RUNNING=str(running))
    command = [*copy.command("run_chosen", *(batch.file for batch in batches)), "-x"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, cwd=copy.path, env=variables, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    hangs = False
    test, since = "", time.monotonic()
    while process.poll() is None and not hangs:
        time.sleep(0.05)
        if running.exists() and (now_runs := running.read_text()) != test:
            test, since = now_runs, time.monotonic()
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        hangs = time.monotonic() - since > busy * (HANGS_S + 10 * seconds.get(test, START_S))
    end_group(process, copy)
    killer = failed.read_text() if failed.exists() else test
    copy.clean()
    if hangs:
        return TIMEOUT, test or batches[0].file
    # Exit code 5 of pytest means that no test ran. This happens if the mutant changes the names of parametrized tests, so that
    # the chosen tests are not found.
    return (SURVIVED, "") if process.returncode in (0, 5) else (KILLED, killer or batches[0].file)
