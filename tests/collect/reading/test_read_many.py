"""Several processes that read runs give the same runs as one process, even if one of the processes fails."""

import json
import os
from multiprocessing import resource_tracker

import pytest
import support_collect as support

from collect.loading import loaded_run
from collect.loading.loaded_run import LoadedRun
from collect.metric import compute_quantities
from collect.reading import load, read_many
from shardlab.runs.record import GpuSample, LineWriter, NicSample, Sample
from shardlab.workspace.workspace import Workspace


def every(workspace) -> list[LoadedRun]:
    return [run for cell in load.load_matrix(workspace, None).cells for run in (*cell.runs, *cell.earlier_attempts)]


@pytest.fixture
def workspace(tmp_path):
    found = support.matrix(tmp_path)
    damaged = found.list_run_dirs()[0].steps_file(0)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    return found


@pytest.fixture
def answers(monkeypatch):
    """A list to which each batch of runs from a reading process is appended. Two processes read, two runs at a time."""
    received = []

    def unpacked(packed):
        received.append(unpack(packed))
        return received[-1]

    unpack = read_many._unpack_runs
    monkeypatch.setattr(read_many, "_unpack_runs", unpacked)
    monkeypatch.setattr(read_many, "LEAST_PARALLEL_RUNS", 2)
    monkeypatch.setattr(read_many, "RUNS_PER_TASK", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    resource_tracker.ensure_running()  # so that no test starts it with a broken Python; it serves all tests of this process
    return received


def assert_same(alone: list[LoadedRun], together: list[LoadedRun]) -> None:
    for one, other in zip(alone, together, strict=True):
        for name in (*set(LoadedRun.__struct_fields__) - {"folder", "quantities"}, "run_id", "coverage"):
            assert getattr(one, name) == getattr(other, name)
        if one.completed:
            assert compute_quantities(one) == compute_quantities(other)
        frames = [(*run.step_frames, *run.samples) for run in (one, other)]
        for mine, theirs in zip(*frames, strict=True):
            assert mine.schema == theirs.schema
            assert mine.equals(theirs)


def test_several_processes_read_the_same_runs_as_one_process(workspace, answers, monkeypatch):
    together = every(workspace)
    assert sum(map(len, answers)) == len(together)
    assert [bool(run.quantities) for run in together] == [run.completed and not run.profiled for run in together]
    monkeypatch.setattr(read_many, "LEAST_PARALLEL_RUNS", 1_000)
    alone = every(workspace)
    assert any(run.damage for run in alone)
    assert any(run.completed for run in alone)
    assert any(run.coverage for run in alone)
    assert_same(alone, together)


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_runs_that_a_reading_process_fails_on_are_read_in_this_process(workspace, answers, monkeypatch, python):
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(python))
    found = every(workspace)
    assert not answers
    monkeypatch.setattr(read_many, "LEAST_PARALLEL_RUNS", 1_000)
    assert_same(every(workspace), found)


def test_a_number_that_no_message_holds_is_damage_of_its_run(workspace, answers, monkeypatch):
    path = workspace.list_run_dirs()[3].result
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parameters": 2**70}))
    found = every(workspace)
    assert len(answers) == 10
    monkeypatch.setattr(read_many, "LEAST_PARALLEL_RUNS", 1_000)
    assert_same(every(workspace), found)
    assert [run.run_id for run in found if "result.json: is not a result of this version" in run.verdict.why] == [
        path.parent.name
    ]


# Maps the name of a file of samples to (host of the samples, number of samples).
HOSTS = {"node-b": ("b", 3), "node-c": ("a", 4), "node-d": ("b", 2)}


def test_samples_that_become_frames_file_by_file_are_the_same_as_all_at_once(tmp_path, monkeypatch):
    """Three files have samples of the hosts b, a and b, so the frames of the files must be sorted. A network interface has
    another name in the second file of host b than in the first."""
    folder = support.completed(Workspace(tmp_path), support.cell())
    for number, (file, (name, count)) in enumerate(HOSTS.items()):
        with LineWriter(folder.samples_file(file)) as lines:
            for tick in range(count):
                nic = NicSample(name=f"eth{number}", kind="physical", mac="02:00:00:00:00:01", tx_bytes=tick)
                gpus = [GpuSample(uuid=f"GPU-{name}", throttled=throttled) for throttled in (["power_cap"], [], None)]
                at_s = 10.0 * number + tick
                lines.write_record(Sample(schema=1, t_s=at_s, wall_s=at_s, host=name, boot_id="b", nics=[nic], gpus=gpus))
    found = {}
    for size in (1, 4, 1000):
        monkeypatch.setattr(loaded_run, "MOST_SAMPLE_RECORDS", size)
        (run,) = read_many.read_runs(folder.path.parent, [folder.run_id])
        assert run.samples.hosts.height >= sum(count for _, count in HOSTS.values())
        found[size] = (*run.samples, *LoadedRun.read(folder).samples)
    for frames in zip(*found.values(), strict=True):
        assert frames[0].equals(frames[1])
        assert frames[0].equals(frames[2])
    nics, gpus = (rows.filter(host="b") for rows in found[1][1:3])
    assert nics.filter(kind="physical")["name"].unique().to_list() == ["eth2"]
    assert gpus["throttled"].to_list() == 5 * [["power_cap"], [], None]
