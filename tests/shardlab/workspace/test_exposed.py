"""shardlab reports a workspace if other users can change its files."""

import os
import subprocess
from pathlib import Path

import pytest
from support_trust import make_own

from provision.cli import main
from shardlab.workspace.workspace import Workspace

LOCAL = str(Path(__file__).parents[3] / "examples/local.yaml")


@pytest.fixture
def workspace(tmp_path):
    made = make_own(tmp_path / "a b")
    made.runs.mkdir()
    for folder in (made.path, made.shardlab_folder, made.runs):
        folder.chmod(0o755)
    return made


def test_a_workspace_that_only_its_owner_can_write_is_not_reported(workspace):
    assert workspace.explain_exposed_folders() == []
    workspace.runs.chmod(0o775)  # a group of users may share a workspace
    workspace.shardlab_folder.chmod(0o1777)  # with the sticky bit, as in /tmp, each user can change only the user's own files
    assert workspace.explain_exposed_folders() == []
    assert Workspace(workspace.path / "not there").explain_exposed_folders() == []


@pytest.mark.parametrize("name", ["path", "shardlab_folder", "runs"])
def test_each_folder_that_all_can_write_is_reported_with_the_command_that_helps(workspace, name, capsys):
    folder = getattr(workspace, name)
    folder.chmod(0o777)
    helps = f"chmod o-w '{folder}'"
    assert workspace.explain_exposed_folders() == [
        f"{folder}: every user of this machine can write to it; if you alone use it, run: {helps}"
    ]
    command = [LOCAL, "down", "--workspace", str(workspace.path)]
    assert main(command) == 2
    assert (
        capsys.readouterr().err.count(workspace.explain_exposed_folders()[0]) == 2
    )  # a warning, and why the command is refused
    subprocess.run(helps, shell=True, check=True)
    assert main(command) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="a folder of another user needs root")
def test_a_folder_of_another_user_is_reported_unless_that_user_called_sudo(workspace, monkeypatch):
    os.chown(workspace.shardlab_folder, 12345, 12345)
    assert workspace.explain_exposed_folders() == [
        f"{workspace.shardlab_folder}: it belongs to another user (uid 12345), who can change its content."
    ]
    monkeypatch.setenv("SUDO_UID", "12345")
    assert workspace.explain_exposed_folders() == []
