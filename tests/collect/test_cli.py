"""The command `collect`: its help, its list of metrics, and `collect fetch` on this machine, which finds changed files."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import support_collect as support

from collect.cli import main
from shardlab.cluster.lease import Lease
from shardlab.runs.rundir import RunDir
from shardlab.transfer import manifest
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace

VERBS = ("fetch", "summarize", "verdicts", "trace", "timeline", "compare", "export", "sample", "metrics")


@pytest.fixture
def workspace(tmp_path):
    made = Workspace(tmp_path)
    support.keep(made, [support.cell()], repeats=1)
    support.completed(made, support.cell())
    return made


@pytest.fixture
def run(workspace) -> RunDir:
    return workspace.list_run_dirs()[0]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert f"example:\n  collect {verb}" in capsys.readouterr().out


def test_the_command_has_a_version_and_needs_a_verb(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2


def test_fetch_needs_no_extra(workspace):
    """test_extras.py tests the verbs that need an extra."""
    code = "import sys; sys.modules['polars'] = None; from collect.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "fetch", "--workspace", str(workspace.path)]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_metrics_are_listed(capsys):
    assert main(["metrics", "--json"]) == 0
    found = {metric["name"]: metric for metric in json.loads(capsys.readouterr().out)}
    assert found["throughput_per_s"]["direction"] == "higher is better"
    assert found["peak_memory_bytes"]["unit"] == "bytes"


def test_an_unknown_baseline_prints_the_menu(workspace, capsys):
    assert main(["summarize", "--baseline", "singel", "--workspace", str(workspace.path)]) == 2
    assert "Did you mean 'single'?" in capsys.readouterr().err
    assert not workspace.report.exists()


def fetched(workspace, capsys, code=0):
    assert main(["fetch", "--json", "--workspace", str(workspace.path)]) == code
    return json.loads(capsys.readouterr().out)


def test_a_finished_run_is_hashed_once(workspace, run, capsys):
    (first,) = fetched(workspace, capsys)
    assert (first["state"], first["complete"], first["hashed"]) == ("completed", True, first["files"])
    found = json.loads((run.path / "manifest.json").read_text())
    assert found["complete"]
    assert found["run_id"] == run.run_id
    assert set(found["files"]) == {
        "env/node0.json", "events.attempt.jsonl", "result.json", "run.json", "samples/node0.jsonl", "steps/rank-00000.jsonl",
    }  # fmt: skip
    assert all(len(file["sha256"]) == 64 for file in found["files"].values())
    before = (run.path / "manifest.json").stat().st_mtime_ns
    (second,) = fetched(workspace, capsys)
    assert second["hashed"] == 0
    assert (run.path / "manifest.json").stat().st_mtime_ns == before
    run.result.touch()
    (third,) = fetched(workspace, capsys)
    assert third["hashed"] == 1
    assert "problems" not in third


def test_a_changed_result_is_reported_until_its_manifest_is_removed(workspace, run, capsys):
    fetched(workspace, capsys)
    run.result.write_bytes(run.result.read_bytes() + b"\n")
    for _ in range(2):
        (found,) = fetched(workspace, capsys, code=1)
        assert found["problems"] == ["result.json: its content changed"]
    (run.path / "manifest.json").unlink()
    fetched(workspace, capsys)


def test_a_file_that_vanished_is_named(workspace, run, capsys):
    fetched(workspace, capsys)
    run.steps_file(0).unlink()
    assert main(["fetch", "--workspace", str(workspace.path)]) == 1
    assert "steps/rank-00000.jsonl: the file is missing" in capsys.readouterr().err


def test_an_event_appended_after_the_end_is_accepted_and_a_changed_event_reported(workspace, run, capsys):
    """An event that is appended to a completed run is accepted; a changed event is reported as a changed file."""
    fetched(workspace, capsys)
    support.event(run, "reconciled", 60)
    (found,) = fetched(workspace, capsys)
    assert "problems" not in found
    path = run.events_file("attempt")
    path.write_bytes(path.read_bytes().replace(b"rendered", b"RENDERED"))
    (found,) = fetched(workspace, capsys, code=1)
    assert found["problems"] == ["events.attempt.jsonl: its content changed"]


def test_a_run_still_going_is_fetched_again_each_time(tmp_path, capsys):
    workspace = Workspace(tmp_path)
    run = support.prepare(workspace, support.cell())
    support.event(run, "started", 0)
    support.train(run, steps=3)
    with run.steps_file(0).open("ab") as handle:
        handle.write(b'{"schema":1,"st')
    (found,) = fetched(workspace, capsys)
    assert (found["state"], found["complete"], found["truncated"], found["corrupt"]) == ("running", False, 1, 0)
    assert not json.loads((run.path / "manifest.json").read_text())["complete"]
    run.steps_file(0).unlink()
    support.finish(run, support.train(run))
    (found,) = fetched(workspace, capsys)
    assert found["complete"]
    assert found["truncated"] == 0


def test_corrupt_lines_are_counted_and_reported(workspace, run, capsys):
    content = run.steps_file(0).read_bytes().splitlines(keepends=True)
    run.steps_file(0).write_bytes(b"".join([content[0], b"\xff\xfe garbage\n", b'{"schema":1}\n', *content[1:]]))
    assert main(["fetch", "--workspace", str(workspace.path)]) == 0
    assert "steps/rank-00000.jsonl: 2 corrupt lines" in capsys.readouterr().err


def test_a_damaged_manifest_is_not_trusted(workspace, run, capsys):
    (run.path / "manifest.json").write_text("{}")
    (found,) = fetched(workspace, capsys, code=1)
    assert "remove it to make a new one" in found["problems"][0]


def test_links_in_a_run_are_named_and_not_followed(workspace, run, capsys):
    (run.path / "env" / "secret").symlink_to("/etc/passwd")
    (run.path / "log").symlink_to("/etc")
    (found,) = fetched(workspace, capsys, code=1)
    assert found["not_regular"] == {"env/secret": "a symlink", "log": "a symlink"}
    assert not [name for name in manifest.read_manifest(run).files if "secret" in name or name.startswith("log")]


def test_hidden_files_and_folders_are_no_part_of_a_run(workspace, run, capsys):
    (run.path / ".rsync-partial").mkdir()
    (run.path / ".rsync-partial/steps").write_text("half")
    (run.path / "steps/.left").write_text("half")
    fetched(workspace, capsys)
    assert not [name for name in manifest.read_manifest(run).files if "/." in f"/{name}"]


def test_fetch_with_names_of_runs_fetches_only_these_runs(workspace, run, capsys):
    assert main(["fetch", "--run", "nothing-*", "--workspace", str(workspace.path)]) == 2
    assert "unknown run 'nothing-*'" in capsys.readouterr().err
    assert main(["fetch", "--run", "single-*", "--workspace", str(workspace.path)]) == 0
    assert (run.path / "manifest.json").exists()


def test_a_workspace_without_runs_is_no_error(tmp_path, capsys):
    assert fetched(Workspace(tmp_path), capsys) == []


def test_fetching_is_urged_near_the_end_of_a_lease(workspace, capsys):
    def said(lease):
        path = inventory.inventory_path(workspace)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.json.encode({"schema": 1, "cluster": "c", "nodes": [], "lease": lease}))
        assert main(["verdicts", "--workspace", str(workspace.path)]) == 0
        return capsys.readouterr().err

    now = datetime.now(UTC)
    near = Lease(now + timedelta(hours=1), now, "manifest")
    assert said(near).rstrip().endswith("copy them to your machine: collect fetch")
    assert "collect fetch" not in said(Lease(now + timedelta(hours=3), now, "manifest"))
    assert "collect fetch" not in said(None)
    said(near)
    assert main(["fetch", "--workspace", str(workspace.path)]) == 0
    assert "collect fetch" not in capsys.readouterr().err
