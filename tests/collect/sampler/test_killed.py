"""The sampler is killed by kill -9 at random moments: at most the sample that it is writing is lost.

The next sampler appends to the same file.
"""

import itertools
import random
import time

import pytest
from support_long import LONG
from support_sampler import records, sampled, start

from shardlab.runs.record import Sample, read_records

pytest_plugins = ["support_nvml"]
KILLS = 100 if LONG else 6
HZ = 50


@pytest.mark.parametrize("seed", [7])
def test_a_sampler_that_is_killed_loses_at_most_the_last_second(tmp_path, nvml, seed):
    nvml.say([f"GPU-{number}" for number in range(8)], power_w=300, utilization=90)
    moments = random.Random(seed)
    out, kept, ends = tmp_path / "node.jsonl", 0, []
    for _ in range(KILLS):
        process = start(out, "--hz", str(HZ), **nvml.environment)
        sampled(process, out)
        time.sleep(moments.uniform(0, 3 / HZ))
        before = len(records(out))
        ends.append(time.monotonic())
        process.kill()
        process.communicate()
        lines = read_records(out, Sample)
        assert len(lines.records) >= before > kept  # every earlier record is still in the file
        last, kept = lines.records[-1], len(lines.records)
        lag = max((two.t_s - one.t_s for one, two in itertools.pairwise(lines.records[before - 3 :])), default=0.0)
        assert ends[-1] - last.t_s < 1 + lag  # `lag`: the longest time without a sample on a busy machine
    lines = read_records(out, Sample)
    assert sum(sample.started_hz is not None for sample in lines.records) == KILLS
    assert lines.corrupt <= KILLS  # each kill damages at most one line
    times = [sample.t_s for sample in lines.records]
    assert times == sorted(times)
    assert all(len(sample.gpus) == 8 for sample in lines.records)
