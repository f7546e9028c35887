"""The modes of files and folders that are private stay private with any umask, and the modes of others follow the umask."""

import os
import stat

import pytest

from collect.archiving import command
from shardlab.cluster import node_folder
from shardlab.files import files, own_folder
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=["umask-000", "umask-022", "umask-077"])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_private_files_and_folders_are_private_with_any_umask(tmp_path, monkeypatch, umask):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    private = own_folder.make_own_folder(tmp_path, "own")
    os.close(node_folder._lock_filled_folder(tmp_path / "data", lambda folder: (folder / "item").write_text("x")))
    workspace = Workspace(tmp_path / "workspace")
    os.umask(
        umask | stat.S_IWOTH
    )  # as every command begins (console.run_command): a workspace that others may write gets no mark
    workspace_trust.begin_workspace(workspace)
    proofs = workspace_trust._proofs_folder()
    files.write_atomic(tmp_path / "token", b"secret", mode=0o600)
    assert {
        "a user's folder in /tmp": mode(private),
        "a folder of data on a node": mode(tmp_path / "data"),
        "the lock of this folder": mode(tmp_path / f"data{node_folder.LOCK_SUFFIX}"),
        "the mark of a workspace": mode(workspace_trust.mark_path(workspace)),
        "the folder of proofs": mode(proofs),
        "a file that is written as private": mode(tmp_path / "token"),
    } == {
        "a user's folder in /tmp": 0o700, "a folder of data on a node": 0o700, "the lock of this folder": 0o600,
        "the mark of a workspace": 0o600, "the folder of proofs": 0o700, "a file that is written as private": 0o600,
    }  # fmt: skip


def test_other_files_follow_the_umask(tmp_path, umask):
    files.write_atomic(tmp_path / "record", b"{}")
    files.write_new(tmp_path / "job.sh", b"", mode=0o755)
    files.write_json(tmp_path / "run.json", {})
    assert mode(tmp_path / "record") == mode(tmp_path / "run.json") == 0o644 & ~umask
    assert mode(tmp_path / "job.sh") == 0o755 & ~umask


@pytest.mark.parametrize(("folder_mode", "lock_mode"), [(0o700, 0o600), (0o750, 0o640), (0o755, 0o644), (0o777, 0o666)])
def test_a_lock_may_be_opened_by_those_who_may_enter_its_folder(tmp_path, umask, folder_mode, lock_mode):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(folder_mode)
    with files.hold_lock(tmp_path / "shared" / "runs.lock"):
        pass
    assert mode(tmp_path / "shared" / "runs.lock") == lock_mode & ~umask


def test_the_members_of_an_archive_have_the_same_mode_with_any_umask(umask):
    assert command._build_entry("workspace/runs/x/run.json").external_attr >> 16 == 0o644
