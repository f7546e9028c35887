"""A file that was written survives a power failure.

The content is synced (fsync) before the file gets its name, and the folder is synced before the command continues.
"""

import os
from pathlib import Path

import pytest

from shardlab import files


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
    with files.writing(folder / "file") as handle:
        handle.write(b"one ")
        handle.write(b"two")
    assert order == ["sync new", "rename new file", "sync folder"]
    assert (folder / "file").read_bytes() == b"one two"


def test_without_sync_nothing_waits_for_the_disk(tmp_path, order):
    files.write_atomic(tmp_path / "file", b"content", sync=False)
    assert order == ["rename new file"]
