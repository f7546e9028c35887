"""Tests of `jobs submit --track`, which logs a run to a tracker while the run trains. A tracker that fails or is missing never
harms the run."""

import argparse
import sys

import pytest
from support_e2e import Bench, benches, until

from jobs import cli
from jobs.verbs import shared_options
from shardlab import extras
from shardlab.errors import InputError
from shardlab.runs.record import TRACKER_ENDED
from shardlab.verb import Invocation
from shardlab.workspace.workspace import Workspace
from tests.collect.exports.test_trackers import tensorboard_is
from tests.collect.tracking.test_track import as_exported, events_of


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


@pytest.mark.e2e
def test_a_run_is_logged_and_completes_even_if_its_tracker_fails(bench):
    name = bench.matrix("axes: {strategy: [ddp], gpus: [2]}")
    bench.run("jobs", "submit", "--matrix", name, "--wait", "--track", "tensorboard")
    (folder,) = bench.folders()
    assert folder.read_run().track == "tensorboard"
    assert TRACKER_ENDED not in [event.event for event in folder.read_events()]
    ended = "metrics/final_loss"  # this metric is logged after the final state of the run is known; --wait does not wait for it
    logged = bench.path / "track" / "tensorboard"
    until((logged / folder.run_id).exists, "the first entry of the tracker")
    until(lambda: ended in events_of(Workspace(bench.path), folder.run_id).Tags()["scalars"], "its end", least_pause_s=0.5)
    tensorboard_is(logged, as_exported(Workspace(bench.path)))

    (bench.path / "track").rename(bench.path / "elsewhere")
    (bench.path / "track").write_text("a file, so that no tracker can write into it\n")
    name = bench.matrix("axes: {strategy: [ddp], gpus: [2]}", steps=4)
    bench.run("jobs", "submit", "--matrix", name, "--wait", "--track", "tensorboard")
    (failed,) = [found for found in bench.folders() if found.run_id != folder.run_id]
    assert failed.judge().state == "completed"
    codes = [1]  # the exit code is recorded after the final state of the run is known; --wait does not wait for it

    def ended_with() -> list[int]:
        return [event.data["code"] for event in failed.read_events() if event.event == TRACKER_ENDED]

    until(lambda: ended_with() == codes, "the end of its tracker", least_pause_s=0.5)
    assert str(bench.path / "track") in (failed.log / "tracker.log").read_text()


def refused(bench, *more):
    return cli.main(["submit", "--matrix", "quickstart", "--workspace", str(bench.path), *more])


def test_a_tracker_that_is_missing_is_named_before_anything_is_submitted(tmp_path, monkeypatch, capsys):
    bench = Bench(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert refused(bench, "--track", "wandb") == 1
    said = capsys.readouterr().err
    assert "jobs submit --track wandb needs the package 'wandb'" in said
    assert extras.make_install_command("wandb") in said
    assert list(bench.path.iterdir()) == []


def test_an_unknown_tracker_is_refused(tmp_path, capsys):
    assert refused(Bench(tmp_path), "--track", "neptune") == 2
    assert "Allowed: mlflow, tensorboard, wandb." in capsys.readouterr().err


def test_nodes_without_a_shared_folder_are_refused(tmp_path):
    (tmp_path / "two.yaml").write_text(
        "{schema: 1, name: two, provider: ssh, nodes: [{name: a, host: 192.0.2.1}, {name: b, host: 192.0.2.2}]}"
    )
    arguments = argparse.Namespace(track="mlflow", cluster=str(tmp_path / "two.yaml"), workspace=str(tmp_path))
    with pytest.raises(InputError, match="the nodes of the cluster two share no folder"):
        shared_options.read_tracker(Invocation(arguments))
