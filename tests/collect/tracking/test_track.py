"""`collect track` logs a run to a tracker while the run writes its records. The tracker's own library reads the logged data."""

import os
import subprocess
import sys

import pytest
import support_collect as support
import support_watch
from support_e2e import HANG_S, until

from collect import summary, tracked_run
from collect.reading import load
from collect.tracking.live_points import LivePoints
from shardlab.runs.record import LineWriter, ValidationRecord
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace
from tests.collect.exports.test_trackers import PACKAGES, mlflow_is, no_network, tensorboard_is, wandb_is  # noqa: F401 - a fixture

DDP = support.cell("ddp", 2)
GPU = {"power_w": 300.0, "memory_used_bytes": 2**30}


@pytest.fixture
def workspace(tmp_path):
    made = Workspace(tmp_path / "workspace")
    support.keep(made, [support.cell(), DDP], repeats=1)
    return made


@pytest.fixture
def whole(tmp_path):
    """A completed run in another workspace. The tests copy its records step by step, as if the run was running."""
    folder = support.completed(Workspace(tmp_path / "played"), DDP, gpu=GPU)
    with LineWriter(folder.validation_file) as lines:
        lines.write_record(ValidationRecord(schema=1, step=10, t_s=0.0, wall_s=0.0, loss=1.5, accuracy=0.25, items=8))
    return folder


class Played:
    """A run in the test's workspace that gets the records of the completed run `whole` step by step."""

    def __init__(self, workspace, whole):
        self.whole, self.folder = whole, support.prepare(workspace, DDP)
        support.event(self.folder, "started", -2)
        support.environment(self.folder)

    def play(self, share):
        """Copy the records of `whole` up to this share (0 to 1) of their bytes. The last line may be cut in the middle."""
        for path in (*self.whole.path.glob("steps/*"), *self.whole.path.glob("samples/*")):
            here = self.folder.path / path.relative_to(self.whole.path)
            here.parent.mkdir(exist_ok=True)
            done = here.stat().st_size if here.exists() else 0
            content = path.read_bytes()
            with here.open("ab") as file:
                file.write(content[done : int(share * len(content))])

    def end(self):
        self.play(1)
        for name in ("validation.jsonl", "result.json"):
            (self.folder.path / name).write_bytes((self.whole.path / name).read_bytes())
        support.event(self.folder, "exited", 60, code=0)


def following(workspace, folder, tracker, *more, **environment):
    command = [sys.executable, "-W", "error::UserWarning", "-m", "collect", "track", folder.run_id, "--to", tracker]
    command += ["--workspace", str(workspace.path), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment)


def as_exported(workspace):
    loaded = load.load_matrix(workspace, None)
    return {run.id: run for run in tracked_run.list_tracked_runs(loaded, summary.summarize(loaded, "single"))}


def events_of(workspace, run_id):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(workspace.path / "track" / "tensorboard" / run_id))
    read.Reload()
    return read


def logged_steps(workspace, run_id):
    if not list((workspace.path / "track" / "tensorboard").glob(f"{run_id}/events*")):
        return []
    read = events_of(workspace, run_id)
    return [event.step for event in read.Scalars("loss")] if "loss" in read.Tags()["scalars"] else []


def test_all_trackers_hold_the_run_as_its_export_does(workspace, whole, monkeypatch, no_network):  # noqa: F811
    played = Played(workspace, whole)
    played.play(0.7)
    run_id = played.folder.run_id
    processes = [following(workspace, played.folder, tracker) for tracker in PACKAGES]
    until(lambda: len(logged_steps(workspace, run_id)) >= 3, "steps are logged while the run goes on", least_pause_s=0.5)
    assert len(logged_steps(workspace, run_id)) < 10
    played.end()
    for process in processes:
        said, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, said
    runs, place = as_exported(workspace), workspace.path / "track"
    assert runs[run_id].timed_steps[-1].values["validation_loss"] == 1.5
    wandb_is(place / "wandb", runs)
    tensorboard_is(place / "tensorboard", runs)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client, experiment = mlflow_is(place / "mlruns", runs)
    (run,) = client.search_runs([experiment.experiment_id])
    system = f"system/{support.HOST}"
    assert run.data.metrics[f"{system}/GPU-0/power_w"] == 300
    sent = [metric.value for metric in client.get_metric_history(run.info.run_id, f"{system}/network_sent_bytes_per_s")]
    assert sent == pytest.approx([2**20] * len(sent), rel=1e-3)
    assert f"{system}/cpu_pct" in events_of(workspace, run_id).Tags()["scalars"]


def test_a_run_whose_records_are_replaced_is_logged_anew(workspace, whole):
    """A run that resumes from a checkpoint replaces its records of the steps after the checkpoint.

    The tracker must have each of these steps only once.
    """
    played = Played(workspace, whole)
    played.play(0.9)
    run_id, path = played.folder.run_id, played.folder.steps_file(0)
    process = following(workspace, played.folder, "tensorboard")
    until(lambda: len(logged_steps(workspace, run_id)) >= 6, "steps are logged", least_pause_s=0.5)
    for rank in (0, 1):
        path = played.folder.steps_file(rank)
        support_watch.replaced(path, b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    until(lambda: logged_steps(workspace, run_id) == [1, 2, 3], "the run is logged anew", least_pause_s=0.5)
    for rank in (0, 1):
        support_watch.replaced(played.folder.steps_file(rank), whole.steps_file(rank).read_bytes())
    played.end()
    said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, said
    tensorboard_is(workspace.path / "track" / "tensorboard", as_exported(workspace))


def test_the_tracker_ends_with_its_parent_and_a_restart_replaces_its_log(workspace, whole):
    played = Played(workspace, whole)
    played.play(0.5)
    run_id = played.folder.run_id
    with subprocess.Popen(["sleep", "600"]) as parent:
        process = following(workspace, played.folder, "tensorboard", "--parent", str(parent.pid))
        try:
            until(lambda: logged_steps(workspace, run_id), "steps are logged", least_pause_s=0.5)
        finally:
            parent.kill()
    said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, said
    played.end()
    said, _ = (later := following(workspace, played.folder, "tensorboard")).communicate(timeout=HANG_S)
    assert later.returncode == 0, said
    tensorboard_is(workspace.path / "track" / "tensorboard", as_exported(workspace))


def test_points_are_those_of_the_export_however_records_come(workspace, whole):
    played = Played(workspace, whole)
    points = LivePoints(played.folder, played.folder.read_run())
    found = []
    for share in range(1, 40):
        played.play(share / 40)
        found += points.read_new_points()
    played.end()
    found += points.read_new_points()
    assert [point.step for point in found] == sorted(point.step for point in found)
    steps = {}
    for point in found:
        if not any(name.startswith("system/") for name in point.values):
            steps.setdefault(point.step, {}).update(point.values)
            assert point.wall_s == as_exported(workspace)[played.folder.run_id].timed_steps[point.step - 1].wall_s
    (run,) = as_exported(workspace).values()
    assert steps == {point.step: pytest.approx(point.values) for point in run.timed_steps}


def test_unknown_runs_and_trackers_are_refused(workspace, whole):
    for run_id, tracker, words in (
        ("no-such-run", "tensorboard", "unknown run"),
        (Played(workspace, whole).folder.run_id, "tensorbord", "Did you mean 'tensorboard'?"),
    ):
        process = following(workspace, RunDir(workspace.runs / run_id), tracker)
        said, _ = process.communicate(timeout=HANG_S)
        assert (process.returncode, words in said) == (2, True), said
