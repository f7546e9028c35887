"""`collect trace --like-hta` gives the same figures on every processor. The figures of HolisticTraceAnalysis (HTA) itself may
differ, but only because its sort is unstable.

The figures of HTA are recorded in golden/hta.json. If HTA is installed, the tests also run HTA, with and without the vector
instructions of the processor, because numpy chooses its sort by these instructions. To record the figures again, name a Python
that has HTA:

    python3 -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis
    SHARDLAB_HTA=/tmp/hta/bin/python SHARDLAB_GOLDEN=write pytest tests/collect/traces/test_hta.py
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import support_hta
import support_traces as support
from hypothesis import given
from hypothesis import strategies as st
from support_e2e import HANG_S

from collect.traces import hta, trace
from collect.traces.breakdown import compute_breakdown

HTA = os.environ.get("SHARDLAB_HTA")
ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "hta.json"
CASES = {
    "since a base": {"ranks": 2, "seed": 11, "kernels": 120},
    "since the epoch": {"ranks": 2, "seed": 12, "kernels": 120, "start": support.OLD},
    "one step": {"ranks": 1, "seed": 13, "steps": 1, "kernels": 60},
    "no collectives": {"ranks": 1, "seed": 14, "kernels": 3},
}
AVX512, AVX2 = ("X86_V4", "AVX512"), ("X86_V3", "AVX2", "FMA3")  # how numpy's names of these vector instructions begin
PROCESSORS = {"this one": (), "without AVX-512": AVX512, "without AVX2 and AVX-512": (*AVX512, *AVX2)}
DISPATCHED = "from numpy._core import _multiarray_umath as numpy; print(*numpy.__cpu_dispatch__)"


def write(folder: Path, *, ranks: int, **keys) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [support.Rank(rank, **keys).write(folder) for rank in range(ranks)]


@cache
def environment(python: str, processor: str) -> dict[str, str]:
    """Returns environment variables that make numpy ignore vector instructions. Names of instructions that this version of
    numpy does not know are left out."""
    known = subprocess.run([python, "-c", DISPATCHED], capture_output=True, text=True, check=True).stdout.split()
    disabled = [name for name in known if name.startswith(PROCESSORS[processor] or ("none",))]
    return {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(disabled)}


def said_by_hta(*folders: Path, processor: str = "this one") -> list[dict]:
    """Runs HTA on each folder of traces and returns HTA's figures by rank. For a percentage of nothing, HTA gives NaN, which
    becomes None here."""
    words, env = [HTA, ROOT / "tools" / "record_hta.py", *folders], environment(HTA, processor)
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=env, timeout=HANG_S)
    return json.loads(done.stdout, parse_constant=lambda _: None)


def check_within_bounds(paths: list[Path], said: dict) -> None:
    """Checks that the figures of HTA and of shardlab for these traces both lie in the range that HTA's unstable sort allows."""
    traces = [trace.read_trace(path) for path in paths]
    found = hta.compute_hta_breakdowns(traces)
    assert [str(ours.rank) for ours in found] == list(said)
    for ours, theirs, bounds in zip(found, said.values(), support_hta.bounds_of(traces), strict=True):
        for name in ("span", "compute", "non_compute", "idle"):
            low, high = getattr(bounds, f"{name}_ns")
            assert low <= getattr(ours, f"{name}_ns") <= high
            assert low <= 1000 * theirs[f"{name}_us"] <= high
        if bounds.overlap_pct is None:
            assert theirs["overlap_pct"] is ours.overlap_pct is None
        else:
            low, high = bounds.overlap_pct
            assert low - 0.005 <= theirs["overlap_pct"] <= high + 0.005  # HTA rounds the percentage to two decimals
        # HTA assigns no type to a kernel with "Sync" in its name, so the kernel is in no table of HTA.
        kernels = {each.name: each.total_ns // 1000 for each in ours.kernels if "Sync" not in each.name}
        assert kernels == theirs["kernels_us"]


@pytest.mark.parametrize("case", CASES)
def test_recorded_figures_of_hta_are_within_the_bounds(tmp_path, case):
    paths = write(tmp_path, **CASES[case])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("SHARDLAB_GOLDEN") == "write" and HTA:
        golden[case] = {"traces": digest, **said_by_hta(tmp_path)[0]}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert golden[case]["traces"] == digest, "the traces are not those that were recorded"
    check_within_bounds(paths, golden[case]["ranks"])


@pytest.mark.skipif(not HTA, reason="no Python with HolisticTraceAnalysis is named in SHARDLAB_HTA")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_figures_that_hta_gives_now_are_within_the_bounds(tmp_path, processor):
    paths = {}
    for seed in range(3):
        start = support.OLD if seed % 2 else support.NEW
        folder = tmp_path / str(seed)
        paths[folder] = write(folder, ranks=3, seed=100 + seed, kernels=200, start=start + seed)
    for folder, said in zip(paths, said_by_hta(*paths, processor=processor), strict=True):
        check_within_bounds(paths[folder], said["ranks"])


def test_every_processor_gives_the_same_figures(tmp_path):
    """`--like-hta` gives equal figures with and without the processor's vector instructions."""
    paths = write(tmp_path, **CASES["since a base"])
    told = {}
    for processor in PROCESSORS:
        words = [sys.executable, "-P", "-m", "collect", "trace", f"{tmp_path}/", "--like-hta", "--json"]
        env = environment(sys.executable, processor)
        told[processor] = json.loads(subprocess.run(words, capture_output=True, check=True, env=env).stdout)["ranks"]
    assert told["without AVX-512"] == told["without AVX2 and AVX-512"] == told["this one"]
    here = hta.compute_hta_breakdowns([trace.read_trace(path) for path in paths])
    assert [one["idle_ns"] for one in told["this one"]] == [one.idle_ns for one in here]


def merged_in_this_order(kernels):
    """Merges the (start, end) pairs of kernels into groups [start, end] in the given order, as HTA does."""
    groups = []
    for start, end in kernels:
        if groups and start <= max(group_end for _, group_end in groups):
            groups[-1][1] = max(groups[-1][1], end)
        else:
            groups.append([start, end])
    return groups


def by_every_order(kernels):
    """HTA may process kernels with equal starts in any order. Returns, over all these orders, (smallest, largest) total length
    of the groups and (smallest, largest) end of the last group."""
    by_start = [list(same) for _, same in itertools.groupby(sorted(kernels), key=lambda kernel: kernel[0])]
    lengths, last_ends = set(), set()
    for orders in itertools.product(*(itertools.permutations(same) for same in by_start)):
        groups = merged_in_this_order([kernel for same in orders for kernel in same])
        lengths.add(sum(end - start for start, end in groups))
        # HTA's sort of the groups is unstable too, so any group with the same start may be the last
        last_ends |= {end for start, end in groups if start == groups[-1][0]}
    return (min(lengths), max(lengths)), (min(last_ends), max(last_ends))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 3)), min_size=1, max_size=7))
def test_bounds_are_the_extremes_over_all_orders_of_equal_starts(pairs):
    """The bounds equal the smallest and largest result over all orders of kernels with equal starts."""
    kernels = [(start, start + length) for start, length in pairs]
    start, end = (np.array(column, np.int64) for column in zip(*kernels, strict=True))
    lengths, last_ends = by_every_order(kernels)
    ours = hta.HtaKernels(np.arange(len(start)), start, end)
    assert support_hta.length_bounds(ours) == lengths
    assert support_hta.span_bounds(ours) == tuple(each - start.min() for each in last_ends)


def test_figures_like_hta_are_rounded_as_hta_rounds(tmp_path):
    """With --like-hta, times are rounded as HTA rounds them, so the idle share differs from the exact share."""
    (path,) = write(tmp_path, ranks=1, seed=15, kernels=80)
    found = trace.read_trace(path)
    (rounded,) = hta.compute_hta_breakdowns([found])
    exact = compute_breakdown(found)
    assert rounded.idle_ns / rounded.span_ns > 1.2 * exact.idle_ns / exact.span_ns
    assert rounded.span_ns < exact.span_ns  # HTA does not count the last step
