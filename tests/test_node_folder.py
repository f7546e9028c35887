"""A folder on a node's own disk: filled once for all processes that use it, and gone when the last of them is gone."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from shardlab import node_folder
from shardlab.errors import WorkspaceError

SPAWN = multiprocessing.get_context("fork")


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"shardlab-data-{os.geteuid()}"


def fill_and_note(notes):
    def fill(folder: Path) -> None:
        (folder / "data").write_text("whole")
        with notes.open("a") as file:
            file.write("filled\n")

    return fill


def use(notes, inside, leave):
    with node_folder.shared("run", fill_and_note(notes)) as folder:
        inside.put((folder / "data").read_text())
        leave.wait()


@pytest.fixture
def users(disk, tmp_path):
    """Starts a process that uses the folder, and waits until it is inside: (the process, the event that lets it leave)."""
    started = []

    def start():
        inside, leave = SPAWN.Queue(), SPAWN.Event()
        process = SPAWN.Process(target=use, args=(tmp_path / "notes", inside, leave))
        process.start()
        started.append(process)
        assert inside.get(timeout=60) == "whole"
        return process, leave

    yield start
    for process in started:
        process.kill()
        process.join()


def left(disk):
    return sorted(path.name for path in disk.iterdir())


def test_one_process_fills_the_folder_and_the_last_one_removes_it(disk, users, tmp_path):
    first, second = users(), users()
    for process, leave in (first, second):
        assert len(left(disk)) == 2
        leave.set()
        process.join(60)
    assert left(disk) == []
    assert (tmp_path / "notes").read_text() == "filled\n"


def test_what_a_killed_process_left_is_removed_and_what_is_used_is_not(disk, users):
    process, _ = users()
    other, _ = users()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert node_folder.remove_unused() == ["run"]
    assert len(left(disk)) == 2
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert len(left(disk)) == 2
    assert node_folder.remove_unused() == []
    assert left(disk) == []


def test_a_folder_that_was_not_filled_to_its_end_is_filled_again(disk, tmp_path):
    def dies(folder):
        (folder / "half").write_text("x")
        os._exit(1)

    process = SPAWN.Process(target=lambda: node_folder.shared("run", dies).__enter__())
    process.start()
    process.join()
    assert len(left(disk)) == 2
    with node_folder.shared("run", fill_and_note(tmp_path / "notes")) as folder:
        assert sorted(path.name for path in folder.iterdir()) == [".filled", "data"]
    assert left(disk) == []


def test_an_error_while_it_is_filled_leaves_nothing(disk):
    def fails(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(WorkspaceError, match="the disk is full"), node_folder.shared("run", fails):
        pytest.fail("the folder was not filled")
    assert left(disk) == []


def test_folders_of_other_nodes_on_a_shared_disk_are_not_touched(disk, monkeypatch, tmp_path):
    with node_folder.shared("run", fill_and_note(tmp_path / "notes")):
        theirs = left(disk)
        monkeypatch.setattr(node_folder, "gethostname", lambda: "another")
        monkeypatch.setattr(node_folder, "_leave", lambda *_: pytest.fail("it is of another node"))
        node_folder.remove_unused()
        assert left(disk) == theirs
        monkeypatch.undo()


def test_a_folder_that_others_can_open_is_not_used(disk):
    disk.mkdir(mode=0o755)
    disk.chmod(0o755)
    with pytest.raises(WorkspaceError, match="only you can open"):
        node_folder.remove_unused()


@pytest.mark.parametrize(("value", "why"), [(None, "TMPDIR is not set"), ("/nowhere/at/all", "TMPDIR is not a folder")])
def test_without_tmpdir_it_is_tmp_and_the_reason_is_said(monkeypatch, value, why):
    monkeypatch.delenv("TMPDIR", raising=False)
    if value:
        monkeypatch.setenv("TMPDIR", value)
    assert node_folder.parent() == (Path("/tmp"), why)
