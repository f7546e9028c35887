"""The modes of files and folders that are private stay private with any umask, and the modes of others follow the umask."""

import contextlib
import os
import stat
import tempfile

import pytest

from collect.archiving import command
from provision.cloudlab import token
from provision.providers import virtual
from shardlab.cluster import node_folder
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.files import files, own_folder
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace
from trainers.forking import address


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
    proofs = workspace_trust._find_proofs_folder()
    files.write_atomic(tmp_path / "token", b"secret", mode=0o600)
    assert {
        "a user's folder in /tmp": mode(private),
        "a folder of data on a node": mode(tmp_path / "data"),
        "the lock of this folder": mode(tmp_path / f"data{node_folder.LOCK_SUFFIX}"),
        "the mark of a workspace": mode(workspace_trust.make_mark_path(workspace)),
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
    assert command._build_zip_entry("workspace/runs/x/run.json").external_attr >> 16 == 0o644


@pytest.mark.parametrize("bit", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001], ids="{:03o}".format)
def test_nothing_that_another_user_may_use_counts_as_private(tmp_path, monkeypatch, bit):
    """Each bit of the group and of others alone is refused for a folder of sockets, for a token and for practice nodes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(token.TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr(virtual, "STATE_FOLDER", tmp_path / "own")
    token_path = tmp_path / token.TOKEN_FILE
    token_path.parent.mkdir(exist_ok=True, parents=True)
    token_path.write_text("secret")
    (tmp_path / "own").mkdir()
    cluster = Cluster(schema=1, name="practice", provider="virtual", nodes=[])
    for is_private in (True, False):
        (tmp_path / "own").chmod(0o700 if is_private else 0o700 | bit)
        token_path.chmod(0o600 if is_private else 0o600 | bit)
        assert own_folder._find_own_folders(tmp_path, "own") == [tmp_path / "own"] * is_private
        assert len(virtual._plan_protections(cluster)) == (not is_private)
        with contextlib.nullcontext() if is_private else pytest.raises(InputError, match="others can use the token"):
            assert token.read_token().reveal() == "secret"


@pytest.mark.parametrize(("mode_of_folder", "is_used"), [(0o700, True), (0o755, True), (0o720, False), (0o702, False)])
def test_sockets_are_in_a_folder_that_no_other_user_can_write(tmp_path, monkeypatch, mode_of_folder, is_used):
    for name, folder_mode in (("runtime", mode_of_folder), ("temporary", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(folder_mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(address, "MOST_FOLDER_BYTES", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = address.choose_socket_folder()
    assert folder.parent == tmp_path / ("runtime" if is_used else "temporary")
    assert mode(folder) == 0o700


def test_locks_of_practice_clusters_are_closed_to_other_users(tmp_path, monkeypatch):
    folder = tmp_path / "locks"
    folder.mkdir(mode=0o755)
    (folder / "other.lock").touch(mode=0o644)
    monkeypatch.setattr(virtual, "LOCKS_FOLDER", folder)
    cluster = Cluster(schema=1, name="practice", provider="virtual", nodes=[])
    assert virtual.list_lock_paths(cluster) == [folder / "practice.lock"]
    assert (mode(folder), mode(folder / "other.lock")) == (0o700, 0o600)
