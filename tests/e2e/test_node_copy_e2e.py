"""Tests of the key `data: {stage: node}`: all ranks of a node read one copy of the data on the node's own disk, and the copy is
removed when the run ends."""

import json
import os
import signal
from pathlib import Path

import pytest
from support_datasets import cifar_members, put
from support_e2e import benches, processes_of, until

from shardlab.files import files

pytestmark = pytest.mark.e2e
CIFAR = "cifar-10-batches-bin"


@pytest.fixture
def bench(tmp_path, short, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    (tmp_path / "node").mkdir()
    for bench in benches(tmp_path):
        put(tmp_path / "data", {f"{CIFAR}/{name.rpartition('/')[2]}": content for name, content in cifar_members().items()})
        (bench.path / "cluster.yaml").write_text(
            f"schema: 1\nname: here\nprovider: local\ndata: {{path: {tmp_path / 'data'}, stage: node}}\n"
        )
        yield bench


def matrix(bench, steps=3, data="cifar10"):
    name = bench.matrix("axes: {strategy: [ddp], gpus: [2]}", steps=steps)
    text = files.read(name).decode().replace("  launcher: fork\n", f"  launcher: fork\n  options: {{data: {data}}}\n")
    (bench.path / "small.yaml").write_text(text)
    return name


def copies(bench):
    return list((bench.path.parent / "node" / f"shardlab-data-{os.geteuid()}").iterdir())


def copied(folder):
    return [event for event in folder.read_events() if event.event == "data_copied"]


def test_two_ranks_make_one_copy_which_is_recorded_and_removed(bench):
    bench.run("jobs", "submit", "--matrix", matrix(bench), "--wait")
    (folder,) = bench.folders()
    assert folder.judge().state == "completed"
    (event,) = copied(folder)
    size = sum(len(content) for content in cifar_members().values())
    assert (event.data["bytes"], event.data["files"], event.data["why"]) == (size, len(cifar_members()), "$TMPDIR")
    assert event.data["seconds"] >= 0
    assert event.data["folder"].startswith(str(bench.path.parent / "node"))
    assert json.loads(folder.run_json.read_text())["data_stage"] == "node"
    assert copies(bench) == []
    first = min(record.wall_s - record.step_ms / 1000 for record in folder.steps(0).records)
    assert event.wall_s < first, "the copy is made before the first step"


def test_the_copy_of_a_killed_run_is_removed(bench):
    bench.run("jobs", "submit", "--matrix", matrix(bench, steps=10**7))
    (folder,) = bench.folders()
    until(lambda: folder.steps(0).records, "the run makes steps")
    assert len(copies(bench)) == 2  # the copy of the data, and the lock file of the copy
    bench.run("jobs", "cancel", "--all")
    until(lambda: folder.judge().state == "cancelled", "the run ended")
    until(lambda: copies(bench) == [], "its copy is removed")


def test_the_next_run_removes_the_copies_of_a_run_whose_supervisor_was_killed(bench):
    bench.run("jobs", "submit", "--matrix", matrix(bench, steps=10**7))
    (folder,) = bench.folders()
    until(lambda: folder.steps(0).records, "the run makes steps")

    # Returns the processes of the runs, of the fork server (its socket is in the second folder) and of its ranks.
    def processes():
        return [*processes_of(bench.path.parent), *processes_of(Path(os.environ["XDG_RUNTIME_DIR"]))]

    # All processes are stopped before the first is killed. Otherwise a rank that sees its peer die ends by itself, and removes
    # the copy before it is killed too.
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes():
            process.send_signal(sent)
    until(lambda: not processes(), "all processes ended")
    assert len(copies(bench)) == 2
    bench.run("jobs", "submit", "--matrix", matrix(bench, steps=2), "--wait")
    assert copies(bench) == []


def test_a_token_file_outside_of_the_data_path_is_refused_before_the_run(bench):
    name = matrix(bench, data="tokens")
    text = files.read(name).decode().replace("vgg16-tiny", "gpt2-tiny")
    text = text.replace("data: tokens", "data: tokens, tokens_file: /x.tokens")
    (bench.path / "small.yaml").write_text(text)
    refused = bench.run("jobs", "submit", "--matrix", name, "--wait", code=2)
    assert "Allowed: a path within the data path" in refused.stderr
    assert bench.folders() == []
