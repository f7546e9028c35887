"""Runs exported to Weights & Biases, MLflow and TensorBoard are read by their own libraries. No data leaves this machine."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading

import pytest
import support_collect as support

from collect import summary, tracked_run
from collect.cli import main
from collect.reading import load
from shardlab import extras
from shardlab.runs.record import LineWriter, ValidationRecord
from shardlab.workspace.workspace import Workspace

PACKAGES = ("wandb", "mlflow", "tensorboard")
SINGLE, DDP = support.cell(), support.cell("ddp", 2)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    """A workspace of two cells. The second cell has an attempt that ran out of memory, and a run that recorded no steps."""
    made = Workspace(tmp_path_factory.mktemp("trackers"))
    support.keep(made, [SINGLE, DDP], repeats=2)
    folder = support.completed(made, SINGLE, 1)
    with LineWriter(folder.validation_file) as lines:
        lines.write_record(ValidationRecord(schema=1, step=5, t_s=0.0, wall_s=0.0, loss=1.5, accuracy=0.25, items=8))
    support.failed(made, DDP, 1, "CUDA out of memory", steps=3)
    support.completed(made, DDP, 1, attempt=2)
    support.prepare(made, DDP, 2)
    return made


@pytest.fixture(scope="module")
def runs(workspace):
    loaded = load.load_matrix(workspace, None)
    return {run.id: run for run in tracked_run.list_tracked_runs(loaded, summary.summarize(loaded, "single"))}


@pytest.fixture
def no_network(monkeypatch):
    """Block the network, and fail the test if a request to another machine was tried.

    In this process, no socket connects to another machine. Child processes use a proxy on this machine, which counts their
    requests.
    """
    connect, asked = socket.socket.connect, []

    def refuse(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            asked.append(address)
            raise OSError(f"{address}: the network is closed to this test")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        place = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, place)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1,localhost")

        def count():
            while True:
                try:
                    proxy.accept()[0].close()
                except OSError:
                    return
                asked.append("proxy")

        counting = threading.Thread(target=count)
        counting.start()
        yield
        proxy.shutdown(socket.SHUT_RDWR)
        counting.join()
    assert asked == []


def exported(workspace, name, out):
    assert main(["export", "--to", name, "--workspace", str(workspace.path), "--out", str(out)]) == 0
    return out


def test_a_run_is_tracked_as_it_was_recorded(runs):
    assert set(runs) == {f"{SINGLE.name()}-r1", f"{DDP.name()}-r1", f"{DDP.name()}-r1-a2", f"{DDP.name()}-r2"}
    single, lost, ddp, waits = (runs[f"{cell.name()}-{tail}"] for cell, tail in (
        (SINGLE, "r1"), (DDP, "r1"), (DDP, "r1-a2"), (DDP, "r2")))  # fmt: skip
    assert [run.state for run in (single, lost, ddp, waits)] == ["completed", "oom", "completed", "planned"]
    assert [len(run.timed_steps) for run in (single, lost, ddp, waits)] == [10, 3, 10, 0]
    third = ddp.timed_steps[2]
    slowest = max(support.step_ms(DDP, rank, 3, 1) for rank in (0, 1))
    assert third.values["step_ms"] == slowest
    assert third.values["throughput_per_s"] == pytest.approx(1000 * 2 * support.TOKENS / slowest)
    assert third.values["loss"] == pytest.approx(support.loss_at(4))
    assert single.timed_steps[4].values.items() >= {"validation_loss": 1.5, "validation_accuracy_pct": 25.0}.items()
    assert ddp.config.items() >= {"strategy": "ddp", "gpus": 2, "optimizer.lr": 3e-4, "attempt": 2, "rehearsal": True}.items()
    assert (ddp.group, ddp.tags) == ("ddp ×2", ["quickstart", "ddp", "completed", "rehearsal"])
    assert ddp.metrics["throughput_per_s"] > 0
    assert lost.metrics == waits.metrics == {}
    assert (waits.began_s, waits.ended_s) == (None, None)


def wandb_records(path):
    """The records in a .wandb file of Weights & Biases.

    After a header, a .wandb file has LevelDB's log format: blocks of 32 KiB, whose parts have a CRC, length, type and data.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    raw, place, data = path.read_bytes(), 7, b""
    assert raw.startswith(b":W&B")
    while place + 7 <= len(raw):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", raw, place)
        data += raw[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # type 1 is a whole record, type 4 the last part of a record
            yield Record.FromString(data)
            data = b""


def test_wandb_holds_every_run_offline(workspace, runs, tmp_path, capfd, no_network):
    out = exported(workspace, "wandb", tmp_path / "out")
    assert capfd.readouterr().err == ""
    exported(workspace, "wandb", out)  # a second export replaces the runs of the first
    files = wandb_is(out / "wandb", runs)
    assert sorted(path for path in out.rglob("*") if not path.is_dir()) == sorted(files)


def wandb_is(folder, runs):
    """Check that a folder of Weights & Biases has these runs and no others. Returns the .wandb files of the runs."""
    files = {path.stem.removeprefix("run-"): path for path in folder.glob("offline-run-*/*.wandb")}
    assert set(files) == set(runs)
    for name, path in files.items():
        wanted, records = runs[name], list(wandb_records(path))
        # The last record with a run counts, because the tags of a run may change at its end.
        run = [record.run for record in records if record.HasField("run")][-1]
        assert (run.run_id, run.display_name, run.run_group, list(run.tags)) == (name, name, wanted.group, wanted.tags)
        assert run.host == (wanted.hosts or "unknown")
        updates = [record.run.config.update for record in records if record.HasField("run")]
        updates += [record.config.update for record in records if record.HasField("config")]
        config = {item.key: json.loads(item.value_json) for update in updates for item in update if item.key != "_wandb"}
        assert config == json.loads(json.dumps(wanted.config))
        history = [
            {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        history = [row for row in history if "loss" in row]
        assert [row["_step"] for row in history] == [point.step for point in wanted.timed_steps]
        for row, point in zip(history, wanted.timed_steps, strict=True):
            assert row.items() >= point.values.items()
            assert row["_timestamp"] == point.wall_s
        ended = {}
        for record in records:
            for item in record.summary.update if record.HasField("summary") else ():
                ended["/".join([item.key, *item.nested_key]).strip("/")] = json.loads(item.value_json)
        assert ended.items() >= {f"metrics/{key}": value for key, value in wanted.metrics.items()}.items()
        (end,) = (record.exit for record in records if record.HasField("exit"))
        assert end.exit_code == (wanted.state != "completed")
    return files.values()


def test_mlflow_holds_every_run_in_a_file_store(workspace, runs, tmp_path, capfd, monkeypatch, no_network):
    out = exported(workspace, "mlflow", tmp_path / "out")
    assert capfd.readouterr().err == ""
    exported(workspace, "mlflow", out)
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    client, experiment = mlflow_is(out / "mlruns", runs)
    assert experiment.artifact_location == (out / "mlruns" / "artifacts").as_uri()
    completed = client.search_runs([experiment.experiment_id], "params.strategy = 'ddp' and attributes.status = 'FINISHED'")
    assert [run.info.run_name for run in completed] == [f"{DDP.name()}-r1-a2"]


def mlflow_is(folder, runs):
    """Check that MLflow's store has these runs and no others. Returns (MLflow's client, the experiment)."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(folder.as_uri())
    (experiment,) = client.search_experiments()
    assert experiment.name == "quickstart"
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(found) == set(runs)
    states = {"completed": "FINISHED", "oom": "FAILED", "planned": "SCHEDULED"}
    for name, wanted in runs.items():
        run = found[name]
        assert run.info.status == states[wanted.state]
        assert run.data.params == {key: str(value) for key, value in wanted.config.items()}
        assert run.data.tags.items() >= {"group": wanted.group, "state": wanted.state}.items()
        assert {key: run.data.metrics[f"metrics/{key}"] for key in wanted.metrics} == wanted.metrics
        losses = client.get_metric_history(run.info.run_id, "loss")
        assert [(one.step, one.value) for one in losses] == [(point.step, point.values["loss"]) for point in wanted.timed_steps]
    return client, experiment


def test_tensorboard_holds_every_run_as_events(workspace, runs, tmp_path, capfd, no_network):
    out = exported(workspace, "tensorboard", tmp_path / "out")
    assert capfd.readouterr().err == ""
    exported(workspace, "tensorboard", out)
    tensorboard_is(out / "runs", runs)


def tensorboard_is(folder, runs):
    """Check that a folder of TensorBoard has these runs and no others."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert {path.name for path in folder.iterdir()} == set(runs)
    for name, wanted in runs.items():
        read = EventAccumulator(str(folder / name))
        read.Reload()
        for key in ("loss", "step_ms", "throughput_per_s"):
            points = read.Scalars(key) if wanted.timed_steps else []
            assert [(one.step, one.wall_time) for one in points] == [(point.step, point.wall_s) for point in wanted.timed_steps]
            # Values are compared approximately, because TensorBoard stores them in float32.
            assert [one.value for one in points] == pytest.approx([point.values[key] for point in wanted.timed_steps])
        ended = {key: read.Scalars(f"metrics/{key}")[0].value for key in wanted.metrics}
        assert ended == pytest.approx(wanted.metrics)
        told = [
            HParamsPluginData.FromString(read.SummaryMetadata(f"_hparams_/session_{end}_info").plugin_data.content)
            for end in ("start", "end")
        ]
        assert told[0].session_start_info.hparams["strategy"].string_value == wanted.config["strategy"]
        assert (told[1].session_end_info.status == 1) == (wanted.state == "completed")


def test_without_the_extra_a_sentence_says_what_to_install(workspace, tmp_path, monkeypatch, capsys):
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
        assert main(["export", "--to", name, "--workspace", str(workspace.path), "--out", str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert f"collect export --to {name} needs the package {name!r}" in said
        assert extras.make_install_command(name) in said
    assert not (tmp_path / "out").exists()


def test_trackers_import_no_torch_and_print_nothing(workspace, tmp_path, no_network):
    code = (
        "import sys; from collect.cli import main\n"
        "for name in sys.argv[2:]:\n"
        "    assert main(['export', '--to', name, '--out', name, '--workspace', sys.argv[1]]) == 0\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    words = ["-W", "error", "-W", "ignore:codecs.open() is deprecated:DeprecationWarning"]  # Python 3.14, by MLflow's own code
    command = [sys.executable, *words, "-c", code, str(workspace.path), *PACKAGES]
    # MLflow sends no telemetry if one of these variables is set. The test removes them, so that MLflow behaves as for users.
    tests = ("CI", "PYTEST_CURRENT_TEST", "PYTEST_VERSION")
    environment = {name: value for name, value in os.environ.items() if name not in tests}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(tmp_path / name) for name in ("wandb/wandb", "mlflow/mlruns", "tensorboard/runs")]
