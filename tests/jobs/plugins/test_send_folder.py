"""The folder of a command is sent from a user's machine to a cluster, and only once."""

import io
import json
import os
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest

from jobs import on_controller
from jobs.planning import plan
from jobs.plugins import command_folder, plugin_store, send_folder
from shardlab.errors import InputError, ShardlabError
from shardlab.matrix import matrix
from shardlab.plugins import command_copies
from shardlab.remote.remote_workspace import RemoteWorkspace
from shardlab.workspace.workspace import Workspace

FILE = """\
schema: 1
name: mine
defaults: {launcher: none, workload: {command: [python, train.py], folder: ../My Net, exclude: [data]}}
"""


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "My Net"
    (made / "data").mkdir(parents=True)
    (made / "sub").mkdir()
    for name in ("train.py", "run.sh", ".gitignore", "sub/own.bin", "data/large", "left.pt"):
        (made / name).write_bytes(b"\xff\x00" + name.encode())
    (made / ".gitignore").write_text("*.pt\n")
    (made / "run.sh").chmod(0o755)
    (made / "link").symlink_to("sub/own.bin")
    return made


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A cluster whose ssh is a program that executes the command on this machine, and notes how many bytes it was sent."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ssh").write_text(
        f"#!/bin/sh\nfor word; do :; done\ncat > {tmp_path}/input\nwc -c < {tmp_path}/input >> {tmp_path}/sizes\n"
        f'exec sh -c "$word" < {tmp_path}/input\n'
    )
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return RemoteWorkspace(
        schema=1, cluster="far", host="10.9.9.1", port=22, user="alice", identity=None, known_hosts="/k", host_keys="strict",
        python=sys.executable, workspace=str(tmp_path / "there"), mark="m",
    )  # fmt: skip


def pack(folder):
    return command_copies.pack_files(folder.path, folder.files)


def write_matrix(tmp_path):
    (tmp_path / "here").mkdir(exist_ok=True)
    (tmp_path / "here" / "mine.yaml").write_text(FILE)
    return matrix.load_matrix(tmp_path / "here" / "mine.yaml")


def test_a_cluster_resolves_the_same_workload_as_the_desk(tmp_path, folder, remote):
    here, there = Workspace(tmp_path / "here"), Workspace(tmp_path / "there")
    loaded = write_matrix(tmp_path)
    folders = command_folder.read_folders(loaded, here)
    send_folder.send_folders(remote, folders.values())
    sent = on_controller.read_matrix_files(tmp_path / "here" / "mine.yaml", loaded)
    for path, content in (sent | on_controller.encode_sent_folders(loaded, folders)).items():
        (there.path / path).parent.mkdir(parents=True, exist_ok=True)
        (there.path / path).write_bytes(content)
    arrived = matrix.load_matrix(there.path / "matrices" / "mine.yaml")
    assert [point.keys["workload"] for point in arrived.points] == ["my-net"]
    (found,) = plan.find_own_plugins(there, arrived).command_folders.values()
    assert (found.digest, found.files) == (
        folders["my-net"].digest,
        [".gitignore", "link", "run.sh", "sub/own.bin", "train.py"],
    )
    (tmp_path / "run").mkdir()
    command_folder.copy_into_run(plugin_store.find_store(there), found.digest, tmp_path / "run")
    assert os.access(tmp_path / "run" / "work" / "run.sh", os.X_OK)
    assert (tmp_path / "run" / "work" / "link").read_bytes() == b"\xff\x00sub/own.bin"


def test_a_sent_folder_is_read_once_before_its_runs_are_rendered(tmp_path, folder, monkeypatch):
    here, there = Workspace(tmp_path / "here"), Workspace(tmp_path / "there")
    loaded = write_matrix(tmp_path)
    folders = command_folder.read_folders(loaded, here)
    command_folder.freeze_folders(there, list(folders.values()))
    for path, content in on_controller.encode_sent_folders(loaded, folders).items():
        (here.path / Path(path).name).write_bytes(content)
    (plugin_store.find_store(here)).parent.mkdir(parents=True)
    plugin_store.find_store(there).rename(plugin_store.find_store(here))
    digested, digest_files = [], command_copies.digest_files
    monkeypatch.setattr(
        command_copies, "digest_files", lambda *arguments: digested.append(arguments[0]) or digest_files(*arguments)
    )
    found = command_folder.read_folders(loaded, here)
    command_folder.freeze_folders(here, list(found.values()))
    assert digested == [found["my-net"].path]


def test_a_folder_is_sent_again_only_after_a_change(tmp_path, folder, remote):
    def count_archives():
        send_folder.send_folders(remote, command_folder.read_folders(write_matrix(tmp_path), Workspace(tmp_path)).values())
        return sum(int(size) > 0 for size in (tmp_path / "sizes").read_text().split())

    assert [count_archives(), count_archives()] == [1, 1]
    (folder / "train.py").write_text("new")
    assert [count_archives(), count_archives()] == [2, 2]


def test_files_that_do_not_have_the_digest_are_refused(folder, remote, tmp_path):
    read = command_folder.read_folder(folder, [])
    with pytest.raises(ShardlabError, match=r"10\.9\.9\.1: the folder 0{16}: did not arrive whole; run the command again"):
        send_folder.send_folders(remote, [msgspec.structs.replace(read, digest="0" * 16)])
    assert list(plugin_store.find_store(Workspace(tmp_path / "there")).iterdir()) == []


@pytest.mark.parametrize(("name", "target"), [("../outside", None), ("/outside", None), ("inside", "/etc/passwd")])
def test_an_archive_writes_nothing_outside_of_the_copy(tmp_path, name, target):
    archive_file = io.BytesIO()
    with tarfile.open(fileobj=archive_file, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
        archive.addfile(member)
    with pytest.raises(InputError, match="did not arrive whole"):
        send_folder.unpack_folder(Workspace(tmp_path / "there"), "0" * 16, archive_file.getvalue())
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_an_archive_that_was_cut_is_refused(tmp_path, folder):
    packed = pack(command_folder.read_folder(folder, []))
    for size in (30, len(packed) // 2):
        with pytest.raises(InputError, match="did not arrive whole"):
            send_folder.unpack_folder(Workspace(tmp_path / "there"), "0" * 16, packed[:size])


def test_a_link_keeps_its_text(tmp_path, folder):
    (folder / "link").unlink()
    (folder / "link").symlink_to("./sub/../sub/own.bin")
    read = command_folder.read_folder(folder, [])
    send_folder.unpack_folder(Workspace(tmp_path / "there"), read.digest, pack(read))
    (folder / "link").unlink()
    (folder / "link").symlink_to(folder / "sub" / "own.bin")
    with pytest.raises(InputError, match="by an absolute path"):
        command_folder.read_folder(folder, [])


def test_the_files_that_were_sent_are_named_in_the_plan(tmp_path, folder, remote):
    loaded = write_matrix(tmp_path)
    folders = command_folder.read_folders(loaded, Workspace(tmp_path))
    (ignored,) = command_folder.describe_folders(folders)
    assert "my-net: runs do not get what git ignores: left.pt" in ignored
    send_folder.send_folders(remote, folders.values())
    ((path, content),) = on_controller.encode_sent_folders(loaded, folders).items()
    (tmp_path / "here" / Path(path).name).write_bytes(content)
    (sentence,) = command_folder.describe_folders(command_folder.read_folders(loaded, Workspace(tmp_path / "there")))
    assert "my-net: runs get the files that were sent together with the matrix" in sentence


def test_bytes_that_are_no_archive_are_refused(tmp_path):
    with pytest.raises(InputError, match="did not arrive whole"):
        send_folder.unpack_folder(Workspace(tmp_path / "there"), "0" * 16, json.dumps({}).encode())
