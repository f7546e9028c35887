"""What a supervisor looks at before and after its run: its claim, its code, the bound on starts, the kernel's kills."""

import json
import os
import subprocess
import sys

import pytest
from support_cells import CELL

from jobs import claim, lost
from jobs.schedulers import local
from shardlab import code, files, host
from shardlab.record import SCHEMA, LineWriter, Sample
from shardlab.run import Run, World
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace


@pytest.fixture
def folder(tmp_path):
    found = RunDir(tmp_path / "runs" / "a-r1")
    found.log.mkdir(parents=True)
    write_run(found)
    return found


def write_run(folder, **changed):
    run = Run(
        schema=1, run_id=folder.run_id, matrix="m", cell=CELL, cell_hash=CELL.hash(), repeat=1, attempt=1, launcher="torchrun",
        rehearsal=False, world=World(1, 2, 2), cluster={"name": "c", "provider": "local"}, data_path="/d", versions={},
        git_commit=None, templates={}, created="2026-11-22T00:00:00+00:00",
    )  # fmt: skip
    files.write_json(folder.run_json, {**json.loads(files.as_json(run)), **changed})
    folder.write_event("controller", "submitted", scheduler="slurm")


def supervised(folder, *command, before="", **environment):
    """A supervisor of this run; `before`: Python that its process runs first."""
    start = "sys.exit(attempt.console.run(lambda: attempt.main(sys.argv[1:])))"
    program = f"import sys; from jobs import attempt, on_node; {before or 'pass'}; {start}"
    words = [sys.executable, "-P", "-c", program, folder.path, "--", *(command or ["true"])]
    given = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | environment
    return subprocess.run(words, capture_output=True, text=True, env=given, check=False, timeout=120)


def in_job(monkeypatch, number, restarts):
    monkeypatch.setenv("SLURM_JOB_ID", number)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))


def test_a_started_again_job_may_take_its_own_run_once_for_each_restart_and_no_other_job_may(folder, monkeypatch):
    in_job(monkeypatch, "7", 0)
    assert claim.take(folder) == "first"
    assert claim.take(folder) is None
    in_job(monkeypatch, "8", 1)
    assert claim.take(folder) is None
    in_job(monkeypatch, "7", 1)
    assert claim.take(folder) == "again"
    assert claim.take(folder) is None
    assert not claim.lost(folder)
    in_job(monkeypatch, "7", 0)
    assert claim.lost(folder)


def test_a_claim_whose_owner_was_killed_before_it_signed_is_open_to_a_restart_alone(folder, monkeypatch):
    folder.claim.mkdir()
    in_job(monkeypatch, "8", 0)
    assert claim.take(folder) is None
    in_job(monkeypatch, "8", 1)
    assert claim.take(folder) == "again"


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_run_is_started_again_as_often_as_it_may_and_no_more(folder, restarts):
    write_run(folder, scheduler="slurm", requeues=1)
    done = supervised(folder, "sh", "-c", "exit 9", SLURM_JOB_ID="7", SLURM_RESTART_COUNT=str(restarts), PATH="/bin")
    (ended,) = [event for event in folder.events() if event.event == "exited"]
    if restarts > 1:
        assert done.returncode == 1
        assert ended.data["why"] == "Slurm has restarted the run 2 times; allowed: 1."
    else:
        assert "has restarted the run" not in ended.data["why"]


def test_a_run_whose_packages_changed_is_given_back_and_not_started(folder):
    write_run(folder, environment="0" * 12)
    done = supervised(folder, "touch", str(folder.path / "begun"))
    assert done.returncode == 76
    assert not folder.claim.exists()
    assert not (folder.path / "begun").exists()
    verdict = folder.judge()
    assert verdict.state == "planned"
    assert f"source changed since the run was submitted (000000000000, now {code.digest()})" in verdict.why


def test_a_run_that_was_begun_with_other_packages_fails_and_says_so(folder):
    write_run(folder, environment="0" * 12, scheduler="slurm", requeues=1)
    folder.claim.mkdir()
    done = supervised(folder, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    assert done.returncode == 1
    assert folder.judge().state == "failed"
    assert "source changed since the run was submitted" in folder.judge().why


@pytest.mark.parametrize(("kills", "state"), [((4, 5), "oom"), ((4, 4), "failed")])
def test_a_run_during_which_the_kernel_killed_for_memory_is_out_of_memory(folder, kills, state):
    # No test can move the kernel's counter.
    counter = f"kills = iter({kills}); on_node.oom_kills = lambda: next(kills)"
    assert supervised(folder, "sh", "-c", "kill -KILL $$", before=counter).returncode == 137
    verdict = folder.judge()
    assert verdict.state == state
    assert ("out of host memory: the kernel's OOM killer" in verdict.why) == (state == "oom")


@pytest.fixture
def at_work(folder):
    """A process that passes for the supervisor of a run, as the event `started` names it."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("changed", "state", "words"),
    [
        ({}, "running", ""),
        ({"created": -3600.0}, "failed", "ended without recording an end"),  # the number is another process's now
        ({"boot_id": "of another boot"}, "node_fail", "the machine restarted while the run was running"),
    ],
)
def test_a_supervisor_is_known_by_more_than_its_number(folder, at_work, changed, state, words):
    data = {"pid": at_work.pid, "created": local.psutil.Process(at_work.pid).create_time(), "boot_id": host.boot_id()}
    data |= {"created": data["created"] + changed["created"]} if "created" in changed else changed
    folder.claim.mkdir()
    folder.write_event("attempt", "started", **data)
    verdict, _ = local._true(Workspace(folder.path.parent.parent), folder, folder.judge())
    assert verdict.state == state
    assert words in verdict.why
    if state != "running":
        local._wait_for_running(Workspace(folder.path.parent.parent))
        assert folder.judge().state == state


def sampled(folder, host_, *times):
    with LineWriter(folder.samples_file(host_)) as lines:
        for wall_s in times:
            lines.write(Sample(schema=SCHEMA, t_s=wall_s, wall_s=wall_s, host=host_, boot_id="b"))


@pytest.mark.parametrize(
    ("last", "lost_ones"),
    [
        ({"a": 100.0}, ["a"]),  # the only one
        ({"a": 100.0, "b": 89.0}, ["b"]),
        ({"a": 100.0, "b": 91.0}, []),  # what ends with the run ends everywhere within seconds
        ({"a": 80.0, "b": 100.0, "c": 70.0, "d": 99.0}, ["a", "c"]),
        ({"a": 100.0, "b": None}, []),  # a machine that never said anything may be well
        ({"a": None, "b": None}, []),
    ],
)
def test_the_lost_nodes_are_those_whose_telemetry_fell_silent_first(folder, last, lost_ones):
    for name, wall_s in last.items():
        if wall_s is not None:
            sampled(folder, name, wall_s - 20, wall_s)
    assert lost.nodes(folder, list(last)) == lost_ones
