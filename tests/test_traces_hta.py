"""In its mode, every figure equals that of HolisticTraceAnalysis: recorded ones always, its own where it is to be had.

To record again, and to compare with traces that were never recorded, name a Python that has HolisticTraceAnalysis:

    python3 -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis
    SHARDLAB_HTA=/tmp/hta/bin/python SHARDLAB_GOLDEN=write pytest tests/test_traces_hta.py
"""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import support_traces as support

from collect.sources import trace
from collect.traces import hta
from collect.traces.breakdown import breakdown

HTA = os.environ.get("SHARDLAB_HTA")
HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "hta.json"
CASES = {
    "since a base": {"ranks": 2, "seed": 11, "kernels": 120},
    "since the epoch": {"ranks": 2, "seed": 12, "kernels": 120, "start": support.OLD},
    "one step": {"ranks": 1, "seed": 13, "steps": 1, "kernels": 60},
    "no collectives": {"ranks": 1, "seed": 14, "kernels": 3},
}


def write(folder: Path, *, ranks: int, **keys) -> list[Path]:
    return [support.Rank(rank, **keys).write(folder) for rank in range(ranks)]


def ours(paths: list[Path]) -> dict:
    """Our figures in the words of record_hta.py."""
    found = {}
    for one in hta.breakdowns([trace.read(path) for path in paths]):
        # HTA reports a kernel that a Sync in its name makes neither computing nor anything else in no table of kernels.
        kernels = {each.name: each.total_ns // 1000 for each in one.kernels if "Sync" not in each.name}
        found[str(one.rank)] = {
            "idle_us": one.idle_ns // 1000,
            "compute_us": one.compute_ns // 1000,
            "non_compute_us": one.non_compute_ns // 1000,
            "span_us": one.span_ns // 1000,
            "overlap_pct": None if one.overlap_pct is None else round(one.overlap_pct, 2),
            "kernels_us": kernels,
        }
    return found


def theirs(folder: Path) -> dict:
    """What HTA says, by rank; its NaN for a percentage of nothing is our None."""
    done = subprocess.run([HTA, HERE / "record_hta.py", folder], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout, parse_constant=lambda _: None)


@pytest.mark.parametrize("case", CASES)
def test_the_figures_are_those_that_were_recorded(tmp_path, case):
    paths = write(tmp_path, **CASES[case])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("SHARDLAB_GOLDEN") == "write" and HTA:
        golden[case] = {"traces": digest, **theirs(tmp_path)}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert golden[case]["traces"] == digest, "the traces are not those that were recorded"
    assert ours(paths) == golden[case]["ranks"]


@pytest.mark.skipif(not HTA, reason="no Python with HolisticTraceAnalysis is named in SHARDLAB_HTA")
@pytest.mark.parametrize("seed", range(8))
def test_the_figures_are_those_that_hta_gives_now(tmp_path, seed):
    start = support.OLD if seed % 2 else support.NEW
    paths = write(tmp_path, ranks=3, seed=100 + seed, kernels=200, start=start + seed)
    assert ours(paths) == theirs(tmp_path)["ranks"]


def test_its_rounding_is_not_ours(tmp_path):
    (path,) = write(tmp_path, ranks=1, seed=15, kernels=80)
    found = trace.read(path)
    (rounded,) = hta.breakdowns([found])
    exact = breakdown(found)
    assert rounded.idle_ns / rounded.span_ns > 1.2 * exact.idle_ns / exact.span_ns
    assert rounded.span_ns < exact.span_ns  # the last step is left out
