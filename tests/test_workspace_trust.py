"""Code in a workspace that was made elsewhere is executed only if the user says --trust."""

import shutil
import tarfile

import pytest

from collect import cli as collect_cli
from jobs import cli as jobs_cli
from jobs.run_queue import RunQueue
from shardlab import files, workspace_trust
from shardlab.workspace import Workspace

MAIN = {"jobs": jobs_cli.main, "collect": collect_cli.main}
HOSTILE = """\
"A model whose code writes a file beside the workspace."
from pathlib import Path
import torch
from torch import nn
Path({marker!r}).write_text("executed")
ITEMS = 64
def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))
def batch(items):
    return items[:, None].expand(-1, 4).float() / 64, items % 3
"""
MATRIX = """\
schema: 1
name: mine
title: mine
defaults: {workload: evil, strategy: single, launcher: fork, global_batch_size: 4, steps: 2}
axes: {seed: [1]}
"""


def call(workspace, words):
    """Runs a command, given as a text, in a workspace and returns its exit code."""
    program, *others = words.split()
    return MAIN[program]([*others, "--workspace", str(workspace.path)])


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Returns (a tar file of a workspace, a path). The workspace contains a hostile workload and a failed run of it. The
    hostile code writes a file at the path when it is executed."""
    folder = tmp_path_factory.mktemp("theirs")
    marker = folder / "marker"
    theirs = Workspace(folder / "w")
    (theirs.path / "workloads").mkdir(parents=True)
    (theirs.path / "workloads" / "evil.py").write_text(HOSTILE.format(marker=str(marker)))
    (theirs.path / "mine.yaml").write_text(MATRIX)
    assert call(theirs, f"jobs render --matrix {theirs.path}/mine.yaml --trust") == 0
    assert marker.exists()
    (run,) = theirs.all_runs()
    for event, data in (("submitted", {"scheduler": "local"}), ("started", {}), ("exited", {"reason": "failed", "code": 1})):
        run.write_event("controller", event, **data)
    with tarfile.open(folder / "w.tar", "w") as tar:
        tar.add(theirs.path, "w")
    return folder / "w.tar", marker


@pytest.fixture
def opened(archive, tmp_path):
    """Returns (the workspace that was unpacked from the tar file, the path of the file that exists only if the hostile code was
    executed)."""
    tar, marker = archive
    marker.unlink(missing_ok=True)
    with tarfile.open(tar) as open_tar:
        open_tar.extractall(tmp_path, filter="data")
    return Workspace(tmp_path / "w"), marker


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("jobs workloads", 1),
        ("jobs plan --matrix {path}/mine.yaml", 2),
        ("jobs render --matrix {path}/mine.yaml", 2),
        ("jobs submit --matrix {path}/mine.yaml", 2),
        ("jobs retry", 2),
        ("jobs status", 0),
        ("collect fetch", 0),
        ("collect summarize", 0),
    ],
)
def test_no_command_executes_the_code_of_an_archive(opened, capsys, words, code):
    workspace, marker = opened
    assert workspace_trust.is_trusted(workspace) is False
    assert call(workspace, words.format(path=workspace.path)) == code
    assert not marker.exists()
    said = capsys.readouterr()
    if code:
        assert "--trust" in said.err
        assert "evil.py" in said.err or "its workload evil" in said.err
    assert workspace_trust.is_trusted(workspace) is False
    assert len(workspace.all_runs()) == 1


def test_a_script_that_waits_in_an_archive_is_not_started(opened, capsys):
    workspace, marker = opened
    (run,) = workspace.all_runs()
    for file in run.path.glob("events.*"):
        file.unlink()
    run.write_event("controller", "submitted", scheduler="local")
    (run.path / "job.sh").write_text(f"touch {marker}\n")
    assert call(workspace, "jobs submit --matrix quickstart") == 2
    assert f"{run.path / 'job.sh'}: not executed" in capsys.readouterr().err
    RunQueue("local", workspace).attend()
    assert not (workspace.own / "local").exists()


def test_bytecode_that_came_with_an_archive_is_not_used(opened):
    workspace, _ = opened
    (copy,) = (workspace.own / "source").iterdir()
    planted = copy / "shardlab" / "__pycache__" / "planted.pyc"
    planted.touch()
    (run,) = workspace.all_runs()
    shutil.rmtree(run.path)
    (workspace.path / "other.yaml").write_text(MATRIX.replace("evil", "gpt2-tiny"))
    assert call(workspace, f"jobs render --matrix {workspace.path}/other.yaml") == 0
    assert (copy / "shardlab" / "cell.py").exists()
    assert not planted.exists()
    beside = workspace.path / "workloads" / "__pycache__" / "_helper.pyc"
    for path in (planted, beside):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    workspace_trust.trust(workspace)
    assert not planted.exists()
    assert not beside.exists()


def test_code_that_the_user_trusts_is_executed_and_nothing_that_the_archive_says_of_it_is_believed(opened, capsys):
    workspace, marker = opened
    (answer,) = (workspace.own / "own").glob("*.json")
    answer.write_text(answer.read_text().replace('"parameters": 67', '"parameters": 1'))
    assert call(workspace, "jobs workloads --trust") == 0
    assert marker.exists()
    assert "67" in capsys.readouterr().out
    assert workspace_trust.is_trusted(workspace)
    marker.unlink()
    assert call(workspace, f"jobs plan --matrix {workspace.path}/mine.yaml") == 0


def test_a_run_that_was_copied_into_an_own_workspace_is_not_executed(opened, tmp_path, capsys):
    theirs, marker = opened
    ours = Workspace(tmp_path / "ours")
    with ours.alone():
        assert workspace_trust.is_trusted(ours)
    shutil.copytree(theirs.runs, ours.runs)
    assert call(ours, "jobs retry") == 2
    assert "was not submitted from this workspace, so it is not executed" in capsys.readouterr().err
    assert not marker.exists()


def test_a_workspace_that_begins_here_is_trusted_and_its_copies_are_not(tmp_path):
    ours = Workspace(tmp_path / "ours")
    with ours.alone():
        pass
    (ours.path / "workloads").mkdir()
    assert workspace_trust.is_trusted(ours)
    shutil.move(ours.path, tmp_path / "moved")
    assert workspace_trust.is_trusted(Workspace(tmp_path / "moved"))
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    assert not workspace_trust.is_trusted(Workspace(tmp_path / "copied"))


@pytest.mark.parametrize("there", ["workloads/a.py", "strategies/a.py", "metrics/a.py", "runs/a-r1/run.json", ".shardlab/x"])
def test_a_workspace_in_which_something_is_stored_does_not_begin_here(tmp_path, there):
    files.make_folder((tmp_path / there).parent)
    (tmp_path / there).touch()
    with Workspace(tmp_path).alone():
        assert not workspace_trust.is_trusted(Workspace(tmp_path))


def test_a_mark_that_another_key_made_does_not_count(tmp_path, monkeypatch):
    ours = Workspace(tmp_path / "ours")
    workspace_trust.trust(ours)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert not workspace_trust.is_trusted(ours)
    workspace_trust.trust(ours)
    assert workspace_trust.is_trusted(ours)
    (tmp_path / "state" / "shardlab" / "workspaces.key").write_bytes(b"")
    assert not workspace_trust.is_trusted(ours)
