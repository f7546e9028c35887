"""`make mutants`: draws mutants of the product by a seed and has the light tests judge them. See docs/design/mutants.md."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from choosing import Recordings, read_killers
from copies import ROOT, tests_digest
from drawing import Mutant, draw
from judging import TIMEOUT, UNCOVERED, Result, confirm, judge, known
from operators import kind
from recording import record

PAGE = ROOT / "docs" / "design" / "mutants.md"
LEAST_PCT = 80.0


def main() -> int:
    """Judges the mutants and prints the result. Returns 0 if enough mutants are killed and docs/design/mutants.md gives a
    reason for every surviving mutant, else 1."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=14, help="which mutants are drawn (default: %(default)s)")
    parser.add_argument("--number", type=int, default=200, help="how many are drawn (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="how many are judged at a time (default: %(default)s)")
    parser.add_argument("--only", metavar="WORD", help="only mutants with this word in their id or in the name of their file")
    parser.add_argument("--known", action="store_true", help="judge nothing: print what the results so far come to")
    arguments = parser.parse_args()
    mutants = draw(arguments.seed, arguments.number)
    if arguments.only:
        mutants = [mutant for mutant in mutants if arguments.only in mutant.name or arguments.only in mutant.file]
    if not arguments.known:
        record(arguments.workers)
        recordings = Recordings()
        unsure = True
        while unsure:
            judge(mutants, recordings, arguments.workers, tests_digest())
            unsure = confirm(mutants, recordings)
    judged = [(mutant, result) for mutant in mutants if (result := known(mutant)) is not None]
    return _report(judged, len(mutants))


def _report(judged: list[tuple[Mutant, Result]], number: int) -> int:
    if not judged:
        print("no mutant was judged")
        return 1
    killed = sum(result.is_killed for _, result in judged)
    share = 100 * killed / number  # a mutant that is not judged yet counts as not killed
    outcomes = Counter(result.outcome for _, result in judged)
    least = "at least " if len(judged) < number else ""
    print(f"{least}{killed} of {number} mutants are killed: {least}{share:.1f} % (asked: {LEAST_PCT:g} %)")
    kinds = Counter(kind(mutant.operator) for mutant, _ in judged)
    killed_of = Counter(kind(mutant.operator) for mutant, result in judged if result.is_killed)
    for name, count in kinds.items():
        print(f"  {name}: {killed_of[name]} of {count}")
    print(f"  {outcomes[TIMEOUT]} of the killed: a test did not end")
    print(f"  {outcomes[UNCOVERED]} of the survivors: no light test runs the line")
    if len(judged) < number:
        print(f"  {number - len(judged)} of {number} are not judged yet; the same command goes on")
    for name in read_killers()["unreliable"]:
        print(f"  this test killed a mutant but also failed without a mutant, so its kills do not count: {name}")
    reasons = _reasons()
    unsaid = 0
    for mutant, result in sorted(judged, key=lambda pair: (pair[0].file, pair[0].at)):
        if not result.is_killed:
            unsaid += mutant.name not in reasons
            print(_row(mutant, result, reasons.get(mutant.name, "")))
    if unsaid:
        print(f"{PAGE.relative_to(ROOT)} gives no reason for {unsaid} survivors; their last column is empty")
    return 0 if share >= LEAST_PCT and not unsaid and len(judged) == number else 1


def _row(mutant: Mutant, result: Result, reason: str) -> str:
    """The row for a surviving mutant in the table of docs/design/mutants.md."""
    before, after = (text.replace("|", "\\|") for text in mutant.change())
    tests = "none" if result.outcome == UNCOVERED else str(result.judges)
    tests += f" (+ {result.left_out} not run)" if result.left_out else ""
    return f"| {mutant.name} | {mutant.file}:{mutant.at} | `{before}` | `{after}` | {tests} | {reason} |"


def _reasons() -> dict[str, str]:
    """Maps the name of each mutant in docs/design/mutants.md to the reason that the page gives for its survival."""
    if not PAGE.exists():
        return {}
    lines = (line for line in PAGE.read_text().splitlines() if line.startswith("| "))
    rows = [line.removesuffix("|").split(" | ") for line in lines]
    return {row[0].removeprefix("| "): row[-1].strip() for row in rows if len(row) > 2 and row[-1].strip()}


if __name__ == "__main__":
    sys.exit(main())
