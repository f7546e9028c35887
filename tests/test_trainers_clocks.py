"""The clocks of hosts, compared by messages between their ranks."""

import numpy as np
import pytest
from support_fork import FORK_RANKS

from shardlab.record import ClockRecord, read_lines
from shardlab.rundir import RunDir
from trainers import clocks


def exchanged(rng, offset_s, rounds=clocks.ROUNDS):
    """(own, reference) wall clocks before and after collectives in which both wait for one another, with random delays."""
    times = []
    now = 1e9
    for _ in range(rounds):
        entered = now + rng.exponential(0.001, 2)
        left = entered.max() + rng.exponential(0.001, 2)
        times.append((entered[0] + offset_s, left[0] + offset_s, entered[1], left[1]))
        now = left.max()
    own_before, own_after, before, after = np.array(times).T
    return [own_before, own_after], [before, after]


@pytest.mark.parametrize("seed", range(50))
def test_the_true_offset_is_within_the_stated_error(seed):
    rng = np.random.default_rng(seed)
    true_s = rng.uniform(-10, 10)
    offset_s, within_s = clocks.between(*exchanged(rng, true_s))
    assert abs(offset_s - true_s) <= within_s + 1e-6
    assert within_s < 0.005


def test_a_clock_that_was_set_meanwhile_has_no_offset():
    own, reference = exchanged(np.random.default_rng(1), 0.0)
    own = [part + np.where(np.arange(clocks.ROUNDS) < 5, 0.0, 3.0) for part in own]
    assert clocks.between(own, reference) is None


# Rank 1 believes that it is on the host `late`, whose clock is 5 s ahead.
RANKS = """
import os, sys, tempfile, time
from pathlib import Path
from types import SimpleNamespace
from shardlab.rundir import RunDir
from trainers import clocks
from trainers.rank import Rank
from trainers.ranks import Ranks

cell = SimpleNamespace(world_size=3)
def rank(number, store):
    ranks = Ranks(Rank(number, int(number == 2), 3, store))
    if number:
        real = time.time
        clocks.time = SimpleNamespace(time=lambda: real() + 5, monotonic=time.monotonic)
    clocks.gethostname = lambda: "late" if number else "first"
    clocks.record(RunDir(Path(sys.argv[1])), ranks, ranks)
    ranks.leave()
"""


def test_the_first_rank_of_each_host_records_its_clock(bench, tmp_path):
    done = bench.scripts.run(RANKS + FORK_RANKS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    folder = RunDir(tmp_path)
    (first,), (late,) = (read_lines(folder.clock_file(host), ClockRecord).records for host in ("first", "late"))
    assert (first.ranks, late.ranks) == ([0], [1, 2])
    assert abs(first.offset_s) <= first.within_s
    assert abs(late.offset_s - 5) <= late.within_s


def test_a_run_compares_clocks_at_its_start_and_at_its_end(bench):
    folder = bench.complete(strategy="ddp", gpus=2, steps=2)
    (host,) = folder.hosts()
    compared = read_lines(folder.clock_file(host), ClockRecord).records
    assert [record.ranks for record in compared] == [[0, 1]] * 2
    steps = folder.steps(0).records
    assert compared[0].wall_s < steps[0].wall_s <= steps[-1].wall_s < compared[1].wall_s
