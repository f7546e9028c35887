"""Damages traces at random and reads them: whatever is in a file, reading it raises nothing and its figures stay possible.

    python tests/support/support_mutants.py FOLDER [--mutants 1000] [--seed 0]

reads mutants of every *.json and *.json.gz in FOLDER (real traces of other projects, which are not part of this repository).
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import msgspec

from collect.traces import hta, trace
from collect.traces.breakdown import compute_breakdown
from collect.traces.file_figures import describe_damage
from collect.traces.rank_analysis import analyse_rank, make_rank_document
from collect.traces.run_answers import RunAnswers

VALUES = [
    *(b"-1", b"0", b"1e999999999", b"-1e400", b"1e-999999999", b"18446744073709551616", b"9" * 400, b"NaN", b"-inf", b"null"),
    *(b"true", b'""', b'"\\ud800"', b'"\xff"', b'"7"', b"[]", b"[1]", b"{}", b"[" * 2000 + b"]" * 2000, b'{"a":' * 2000),
]
PIECES = [
    b"}",
    b"{",
    b"]",
    b"[",
    b'"',
    b",",
    b":",
    b"\\",
    b"\x00",
    b"},{",
    b'"ph":',
    b"\\ud800",
    b"\n",
    b"//",
    b'"traceEvents": [',
]
NUMBERS = b"0123456789"


def mutant(content: bytes, pick: random.Random) -> bytes:
    """A mutant of a trace: the bytes of the trace file, changed at one to three random places."""
    for _ in range(pick.randint(1, 3)):
        at, length = pick.randrange(len(content) + 1), int(2 ** pick.uniform(0, 12))
        kind = pick.randrange(7)
        if kind == 0:
            content = content[:at]
        elif kind == 1:
            content = content[:at] + content[at + length :]
        elif kind == 2:
            content = content[:at] + pick.choice(PIECES) + content[at:]
        elif kind == 3:
            content = content[:at] + pick.randbytes(min(length, 40)) + content[at + min(length, 40) :]
        elif kind == 4:
            other = pick.randrange(len(content) + 1)
            content = content[:at] + content[other : other + length] + content[at:]
        else:
            content = _with_value(content, at, pick)
    return content


def _with_value(content: bytes, at: int, pick: random.Random) -> bytes:
    """Replace the value after the next colon, up to the next comma, brace or line end."""
    begin = content.find(b":", at) + 1
    end = min((found for mark in (b",", b"}", b"\n") if (found := content.find(mark, begin)) >= 0), default=len(content))
    return content[:begin] + pick.choice(VALUES) + content[end:]


def check(path: Path) -> None:
    """Read a trace, compute every figure that needs only this trace, and check that the figures are possible.

    Raises the exception of the reader, or AssertionError.
    """
    found = trace.read_trace(path)
    describe_damage(found)
    if (analysis := analyse_rank(found)) is not None:
        msgspec.json.encode([make_rank_document(analysis), RunAnswers([analysis, analysis]).make_document()])
        for layer in analysis.layers:
            assert min(layer.calls, layer.forward_host_ns, layer.forward, layer.backward or 0) >= 0, layer
        for use in analysis.memory:
            assert use.start_bytes <= use.peak_bytes, use
            assert all(point.allocated <= use.peak_bytes for point in use.points), use
    told = [one for one in (compute_breakdown(found), *hta.attempt_breakdowns([found])) if hasattr(one, "compute_ns")]
    for one in told:
        assert min(one.span_ns, one.compute_ns, one.communication_ns, one.idle_ns, one.non_compute_ns) >= 0, one
        assert 0 <= one.overlap_ns <= min(one.compute_ns, one.communication_ns), one
        assert one.compute_ns + one.non_compute_ns + one.idle_ns == one.span_ns, one


def faults(whole: bytes, count: int, seed: str, path: Path) -> Counter[str]:
    """Read `count` mutants of a trace, and count how many raise each exception.

    path: the file to which each mutant is written in turn. seed: makes the mutants reproducible.
    """
    found: Counter[str] = Counter()
    for number in range(count):
        pick = random.Random(f"{seed} {number}")
        content = mutant(whole, pick)
        path.write_bytes(mutant(gzip.compress(content, 1), pick) if number % 10 == 9 else content)
        try:
            check(path)
        except Exception as error:  # noqa: BLE001  # this program looks for every kind of exception
            place = traceback.extract_tb(error.__traceback__)[-1]
            found[f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno} (seed {seed!r}, first {number})"] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutants", type=int, default=1000, help="of all files together (default: 1000)")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--most-mb", type=float, default=20.0, help="of text; larger files are left out (default: 20)")
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.folder.rglob("*") if path.name.endswith((".json", ".json.gz")))
    texts = {path.name: _text(path) for path in paths}
    texts = {name: text for name, text in texts.items() if 0 < len(text) < arguments.most_mb * 1e6}
    found: Counter[str] = Counter()
    share = -(-arguments.mutants // max(1, len(texts)))
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            found += faults(text, share, f"{arguments.seed} {name}", Path(folder) / "t.json")
    sys.stdout.write(f"{len(texts)} of {len(paths)} files, {share * len(texts):,} mutants, {sum(found.values())} uncaught\n")
    for fault, count in found.most_common():
        sys.stdout.write(f"{count:6} {fault}\n")
    return 1 if found else 0


def _text(path: Path) -> bytes:
    raw = path.read_bytes()
    return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw


if __name__ == "__main__":
    sys.exit(main())
