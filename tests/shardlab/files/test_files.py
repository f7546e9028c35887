"""A file that was written survives a power failure.

The content is synced (fsync) before the file gets its name, and the folder is synced before the command continues.
"""

import os
from pathlib import Path

import pytest

from shardlab.files import files


@pytest.fixture
def order(monkeypatch):
    """A list that records each call of fsync and rename as text with the names of files, in the order of the calls.

    The random name of a temporary file is replaced by "new".
    """
    said, fsync, rename = [], os.fsync, os.rename

    def synced(descriptor):
        fsync(descriptor)
        said.append(f"sync {_name(Path(f'/proc/self/fd/{descriptor}').readlink())}")

    def renamed(source, target, **options):
        rename(source, target, **options)
        said.append(f"rename {_name(source)} {_name(target)}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    return said


def _name(path):
    name = Path(path).name
    return "new" if name.endswith(".tmp") else name


def test_an_atomic_write_syncs_the_file_then_renames_it_then_syncs_the_folder(tmp_path, order):
    folder = tmp_path / "folder"
    folder.mkdir()
    files.write_atomic(folder / "file", b"content")
    assert order == ["sync new", "rename new file", "sync folder"]
    assert (folder / "file").read_bytes() == b"content"


def test_a_file_that_is_written_in_parts_is_synced_likewise(tmp_path, order, monkeypatch):
    monkeypatch.setattr(Path, "rename", lambda self, target: os.rename(self, target))
    folder = tmp_path / "folder"
    folder.mkdir()
    with files.open_atomic(folder / "file") as handle:
        handle.write(b"one ")
        handle.write(b"two")
    assert order == ["sync new", "rename new file", "sync folder"]
    assert (folder / "file").read_bytes() == b"one two"


def test_without_sync_nothing_waits_for_the_disk(tmp_path, order):
    files.write_atomic(tmp_path / "file", b"content", sync=False)
    assert order == ["rename new file"]


def test_a_file_without_end_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "run.json"
    path.touch()
    os.truncate(path, 1 << 36)  # a file with a hole takes no room on the disk
    with pytest.raises(files.TooLarge, match="more than 67,108,864 bytes"):
        files.read(path)
    os.truncate(path, 10)
    assert files.read(path, 10) == bytes(10)
    with pytest.raises(files.TooLarge, match="more than 9 bytes"):
        files.read(path, 9)
    assert int(files.read("/proc/sys/kernel/pid_max")) > 0, "a file of the kernel says that it has no bytes"


def test_a_link_is_followed_only_to_a_regular_file_and_only_if_the_user_names_it(tmp_path):
    (tmp_path / "shared.yaml").write_text("content")
    for name, target in (("link", "shared.yaml"), ("zero", "/dev/zero"), ("gone", "nowhere")):
        (tmp_path / name).symlink_to(target)
    assert files.read(tmp_path / "link", follow_links=True) == b"content"
    with pytest.raises(files.NotRegular, match="it is a symlink"):
        files.read(tmp_path / "link")
    with pytest.raises(files.NotRegular, match="it is a device"):
        files.read(tmp_path / "zero", follow_links=True)
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "gone", follow_links=True)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.with_name("victim")), lambda path: path.mkdir()])
def test_the_output_of_a_process_is_appended_only_to_a_regular_file(tmp_path, make):
    (tmp_path / "victim").write_text("mine")
    make(tmp_path / "log")
    with pytest.raises(OSError, match=r"symlink|FIFO|directory"):
        files.open_append(tmp_path / "log")
    assert (tmp_path / "victim").read_text() == "mine"
    with files.open_append(tmp_path / "new") as log:
        assert os.get_blocking(log.fileno())


def test_a_file_of_proc_is_read_whole():
    path = Path("/proc/sys/fs/inotify/max_user_instances")
    assert files.read(path) == path.read_bytes()
    assert len(files.read(path)) > 2
