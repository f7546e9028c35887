"""Which changes of files count as progress of a run, and the message about a run that hangs, which makes no progress."""

import msgspec
import pytest
from support_cells import CELL
from support_clock import Clock

from jobs.node import hang_detection, node_processes
from jobs.node.hang_detection import HangWatch
from shardlab.files import files
from shardlab.runs.record import LineWriter, StepRecord
from shardlab.runs.run import Run, World
from shardlab.runs.rundir import RunDir


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(hang_detection, "time", made)
    return made


@pytest.fixture
def folder(tmp_path):
    made = RunDir(tmp_path / "run")
    made.log.mkdir(parents=True)
    cell = msgspec.structs.replace(CELL, gpus=3, hang_limit_s=10)
    run = Run(
        schema=1, run_id="run", matrix="m", cell=cell, cell_hash=cell.hash(), repeat=1, attempt=1, launcher="torchrun",
        rehearsal=False, world=World(1, 3, 3), cluster={}, data_path="", versions={}, git_commit=None, templates={},
        created="2026-01-01T00:00:00Z",
    )  # fmt: skip
    files.write_json(made.run_json, run)
    return made


def step(folder, rank, number, *, warmup=False):
    with LineWriter(folder.steps_file(rank)) as lines:
        lines.write_record(StepRecord(schema=1, step=number, t_s=0.0, wall_s=1e9 + number, units=1, step_ms=1.0, warmup=warmup))


def looks(clock, watched, seconds):
    """Let `seconds` pass while the watch checks every second. Returns whether its last check reports a hang."""
    for _ in range(seconds - 1):
        clock.now += 1.0
        assert not watched.has_hung()
    clock.now += 1.0
    return watched.has_hung()


def test_a_run_without_progress_for_longer_than_its_limit_hangs(folder, clock):
    """A run without progress for longer than the limit (10 s) hangs."""
    watched = HangWatch(folder, 10)
    assert not looks(clock, watched, 10)  # no hang: the start of the run counts as progress
    assert looks(clock, watched, 1)


@pytest.mark.parametrize(
    ("grows", "counts"),
    [
        ("steps/rank-00002.jsonl", True),
        ("validation.jsonl", True),
        ("events.rank-00001.jsonl", True),
        ("checkpoints/step-4.growing/rank-00001.bin", True),
        ("env/n1.json", True),
        ("log/rank-00000.log", False),
        ("samples/n1.jsonl", False),
    ],
)
def test_records_of_ranks_are_progress_and_logs_and_telemetry_are_not(folder, clock, grows, counts):
    file = folder.path / grows
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    watched = HangWatch(folder, 10)
    assert not looks(clock, watched, 8)
    with file.open("a") as handle:
        handle.write("more\n")
    assert not looks(clock, watched, 2)
    assert looks(clock, watched, 1) is not counts


def test_hang_watch_ignores_time_in_which_the_supervisor_was_suspended(folder, clock):
    """Time in which the supervisor itself was suspended does not count towards the limit."""
    watched = HangWatch(folder, 10)
    assert not looks(clock, watched, 5)
    clock.now += 5000.0  # the job was suspended, so no check took place
    assert not watched.has_hung()
    assert not looks(clock, watched, 3)
    assert looks(clock, watched, 1)


@pytest.mark.parametrize(("limit_s", "every_s"), [(3, 1.0), (600, 10.0), (1800, 30.0), (86400, 30.0)])
def test_a_longer_hang_limit_reads_the_disk_less_often(folder, clock, limit_s, every_s):
    """The watch reads the files of a run every `every_s` seconds, less often for a longer limit."""
    watched = HangWatch(folder, limit_s)
    watched.has_hung()
    folder.write_event("rank-00000", "late", sync=False)
    clock.now += every_s - 0.1
    assert not watched.has_hung()
    assert not watched._file_stats
    clock.now += 0.1
    assert not watched.has_hung()
    assert watched._file_stats


def test_the_reason_of_a_hang_names_the_ranks_that_are_behind(folder):
    begins = "no progress for 10 s (hang_limit): "
    ends = "; the stacks of the ranks are in log/rank-*.log"
    watched = HangWatch(folder, 10)
    assert watched.explain_hang() == f"{begins}no rank has made a step{ends}"
    step(folder, 0, 1, warmup=True)
    step(folder, 2, 1, warmup=True)
    assert watched.explain_hang() == f"{begins}rank 1 made no step, the others reached step 1 of the warm-up{ends}"
    step(folder, 1, 1, warmup=True)
    for rank in (0, 1):
        step(folder, rank, 1)
    at = "at 2001-09-09 01:46:4"
    late = f"rank 2 reached only step 1 of the warm-up, {at}1 UTC"
    assert watched.explain_hang() == f"{begins}{late}; the others reached step 1{ends}"
    step(folder, 2, 1)
    step(folder, 1, 2)
    assert watched.explain_hang() == f"{begins}ranks 0, 2 reached only step 1, {at}1 UTC; the others reached step 2{ends}"
    for rank in (0, 2):
        step(folder, rank, 2)
    assert watched.explain_hang() == f"{begins}ranks 0, 1, 2 reached step 2, {at}2 UTC{ends}"


IN_JOB = "12:memory:/other\n0::/system.slice/n1_slurmstepd.scope/job_71/step_0/user/task_0\n"


def test_a_job_with_a_cgroup_counts_its_own_lack_of_memory(tmp_path):
    events = tmp_path / "system.slice/n1_slurmstepd.scope/job_71/memory.events"
    assert node_processes.find_oom_counters(IN_JOB, tmp_path) == []  # the job's cgroup has no memory.events yet
    events.parent.mkdir(parents=True)
    events.write_text("low 0\nhigh 0\nmax 5\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert node_processes.find_oom_counters(IN_JOB, tmp_path) == [events]
    in_job_v1 = "9:cpuset:/slurm/uid_1000/job_71\n9:memory:/slurm/uid_1000/job_71/step_0/task_0\n0::/\n"
    for elsewhere in ("0::/user.slice/user-1000.slice\n", in_job_v1, "0::/job_71x/y\n", ""):
        assert node_processes.find_oom_counters(elsewhere, tmp_path) == []
    kills = [tmp_path / "memory/slurm/uid_1000/job_71" / path / "memory.oom_control" for path in (".", "step_0/task_0")]
    for file in kills:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert node_processes.find_oom_counters(in_job_v1, tmp_path) == kills
