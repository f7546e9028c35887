"""Runs every launcher with real ranks on this machine: the losses are equal, every failure is reported, and signals are
handled."""

import json
import os
import signal
from socket import gethostname

import psutil
import pytest
from support_e2e import benches, processes_of, until

from jobs.launcher import load_launchers
from shardlab.runs.checkpoint import list_checkpoints

pytestmark = pytest.mark.e2e
EVERY = sorted(name for name, launcher in load_launchers().items() if launcher.starts_trainings)
FOREVER = 10**7


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


def losses(folder):
    return [[record.loss for record in folder.steps(rank).records] for rank in range(folder.read_run().cell.gpus)]


def exit_code(folder):
    (code,) = [event.data["code"] for event in folder.read_events() if event.event == "exited"]
    return code


def at_work(bench):
    """Waits until all ranks of the only run of the workspace have recorded steps, then returns the folder of the run."""
    return until(
        lambda: next((f for f in bench.folders() if all(f.steps(rank).records for rank in (0, 1))), None),
        "its ranks make steps",
    )


def test_a_cell_has_the_same_losses_through_each_launcher(bench, monkeypatch):
    # Ranks use no GPU here, because losses computed on CPUs are equal to the last bit.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert EVERY == ["deepspeed", "fork", "submitit", "torchrun"]
    name = bench.matrix(f"axes: {{strategy: [ddp], gpus: [2], launcher: {EVERY}, prove: ['off']}}", steps=5)
    sent = bench.json("jobs", "submit", "--matrix", name, "--wait")
    assert {run["state"] for run in sent["runs"]} == {"completed"}
    found = {folder.read_run().launcher: losses(folder) for folder in bench.folders()}
    assert sorted(found) == EVERY
    assert [len(steps) for steps in found["torchrun"]] == [5, 5]
    assert all(one == found["torchrun"] for one in found.values())
    seen = [json.loads(folder.environment_file(gethostname()).read_text())["variables"] for folder in bench.folders()]
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in seen] == [""] * len(EVERY)
    until(lambda: not processes_of(bench.path), "nothing is left")


@pytest.mark.parametrize("launcher", EVERY)
def test_the_exit_code_of_a_rank_is_not_lost(bench, launcher):
    huge = "workload: gpt2-tiny, seq_len: 16, options.n_embd: 1099511627776"
    name = bench.matrix(f"axes: {{strategy: [ddp], gpus: [2]}}\ninclude: [{{launcher: {launcher}, {huge}}}]")
    (run,) = bench.json("jobs", "submit", "--matrix", name, "--no-fit-check", "--wait", code=1)["runs"]
    assert (run["state"], exit_code(bench.folders()[0])) == ("oom", 1)


@pytest.mark.parametrize(
    ("launcher", "module"), [("submitit", "jobs.launchers.submitit"), ("deepspeed", "deepspeed.launcher.launch")]
)
def test_a_killed_launcher_leaves_no_rank_behind(bench, launcher, module):
    name = bench.matrix(f"axes: {{strategy: [ddp], gpus: [2], launcher: [{launcher}]}}", steps=FOREVER)
    bench.run("jobs", "submit", "--matrix", name)
    folder = at_work(bench)
    (mine,) = [process for process in processes_of(folder.path) if module in process.cmdline()[:3]]
    mine.kill()
    until(lambda: folder.judge().state == "failed", "the run fails")
    assert exit_code(folder) == 128 + signal.SIGKILL
    until(lambda: not processes_of(folder.path), "nothing is left")


def test_a_signal_of_submitit_makes_all_ranks_save_and_a_retry_resumes(bench):
    saved = "instruments: {checkpoints: {every_steps: 1000000}}"
    name = bench.matrix(f"axes: {{strategy: [ddp], gpus: [2]}}\ninclude: [{{launcher: submitit, {saved}}}]", steps=FOREVER)
    bench.run("jobs", "submit", "--matrix", name)
    folder = at_work(bench)
    os.kill(process_of_rank(folder, 0).pid, signal.SIGUSR2)
    until(lambda: folder.judge().state == "timeout", "all ranks save and end")
    assert "saved after step" in folder.judge().why
    assert len(list_checkpoints(folder.path)) == 1
    sent = bench.run("jobs", "retry", "--only", "timeout").stdout
    assert "from its checkpoint at step" in sent


def process_of_rank(folder, rank):
    """Returns the process that submitit started for this rank."""
    for process in processes_of(folder.path):
        if "submitit.core._submit" in process.cmdline() and process.environ()["SUBMITIT_LOCAL_GLOBALID"] == str(rank):
            return psutil.Process(process.pid)
    raise AssertionError(f"submitit has no process for rank {rank}")
