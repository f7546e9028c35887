"""If a sampler is killed during a run, the supervisor starts it again. The run continues, and the report says for which time
telemetry is missing."""

import contextlib
import re
import socket

import psutil
import pytest
from support_e2e import HANG_S, benches, until

from jobs.node.node_processes import MOST_SAMPLER_STARTS
from shardlab.runs.record import SAMPLER_ENDED

pytestmark = pytest.mark.e2e


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


def lines_of_samples(folder):
    return sum(path.read_bytes().count(b"\n") for path in (folder.path / "samples").glob("*.jsonl"))


def sampler_of(folder):
    """Returns the process of the sampler of this run; None if no such process runs."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "sample" in words and any(word.startswith(f"--out={folder.path}/") for word in words):
                return process
    return None


def kill_sampler(folder):
    """Kills the sampler of this run, and waits until the run's supervisor has recorded that the sampler ended."""
    sampler = until(lambda: sampler_of(folder), "the run has a sampler", HANG_S)
    ends = ended(folder)
    sampler.kill()
    until(lambda: ended(folder) > ends, "the end of the sampler is on record", HANG_S)


def ended(folder):
    return sum(event.event == SAMPLER_ENDED for event in folder.read_events())


def test_a_run_whose_sampler_is_killed_goes_on_and_its_report_says_so(bench):
    name = bench.matrix("axes: {strategy: [single], workload: [gpt2-tiny], seq_len: [16], seed: [1, 2]}", steps=1500)
    bench.run("jobs", "submit", "--matrix", name)
    folders, host = bench.folders(), socket.gethostname()
    at_once = until(lambda: next(filter(sampler_of, folders), None), "a run has a sampler", HANG_S)
    kill_sampler(at_once)
    (midway,) = (folder for folder in folders if folder is not at_once)
    until(lambda: any(not record.warmup for record in midway.steps(0).records), "the other run is timed", HANG_S)
    enough = lines_of_samples(midway) + 3  # enough for some samples in the timed steps, also on a busy machine
    until(lambda: lines_of_samples(midway) >= enough, "the sampler gets to the timed window", HANG_S)
    for _ in range(MOST_SAMPLER_STARTS):  # after so many starts, the supervisor does not start the sampler again
        kill_sampler(midway)
    until(lambda: set(bench.states().values()) == {"completed"}, "both runs complete", HANG_S)
    summary = bench.json("collect", "summarize")
    said = {entry["run"]: entry for entry in summary["telemetry"]}
    assert (said[at_once.run_id]["sampler_ends"], said[midway.run_id]["sampler_ends"]) == (1, MOST_SAMPLER_STARTS)
    assert re.fullmatch(r"no samples in the last \d+\.\d s", said[midway.run_id]["incomplete"])
    assert said[at_once.run_id]["host"] == said[midway.run_id]["host"] == host
    (remark,) = [remark for remark in summary["remarks"] if "telemetry covers only a part of the timed window" in remark]
    assert f"{midway.run_id} on {host} ({said[midway.run_id]['incomplete']})" in remark
    (troubles,) = [remark for remark in summary["remarks"] if "its sampler ended" in remark]
    for run, times in ((at_once, "1 time"), (midway, f"{MOST_SAMPLER_STARTS} times")):
        assert f"{run.run_id} on {host} (its sampler ended {times} while the run went on)" in troubles
