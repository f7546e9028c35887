"""A folder on a node's own disk, which several processes share: it is filled once, and is removed when the last process that
uses it ends."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from support_cells import CELL
from support_e2e import HANG_S

from jobs.node import node_processes
from shardlab.cluster import node_folder
from shardlab.errors import WorkspaceError
from shardlab.files import files
from shardlab.runs.run import Run, World
from shardlab.runs.rundir import RunDir

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
    with node_folder.hold_shared_folder("run", fill_and_note(notes)) as folder:
        inside.put((folder / "data").read_text())
        leave.wait()


@pytest.fixture
def users(disk, tmp_path):
    """Returns a function that starts a process and waits until the process uses the shared folder. The function returns (the
    process, an event that makes the process leave the folder and end)."""
    started = []

    def start():
        inside, leave = SPAWN.Queue(), SPAWN.Event()
        process = SPAWN.Process(target=use, args=(tmp_path / "notes", inside, leave))
        process.start()
        started.append(process)
        assert inside.get(timeout=HANG_S) == "whole"
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
        process.join(HANG_S)
    assert left(disk) == []
    assert (tmp_path / "notes").read_text() == "filled\n"


def test_folders_of_killed_processes_are_removed_and_used_folders_kept(disk, users):
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

    process = SPAWN.Process(target=lambda: node_folder.hold_shared_folder("run", dies).__enter__())
    process.start()
    process.join()
    assert len(left(disk)) == 2
    with node_folder.hold_shared_folder("run", fill_and_note(tmp_path / "notes")) as folder:
        assert sorted(path.name for path in folder.iterdir()) == [".filled", "data"]
    assert left(disk) == []


def test_an_error_while_a_folder_is_filled_leaves_no_folder(disk):
    def fails(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(WorkspaceError, match="the disk is full"), node_folder.hold_shared_folder("run", fails):
        pytest.fail("the folder was not filled")
    assert left(disk) == []


def test_folders_of_other_nodes_on_a_shared_disk_are_not_touched(disk, monkeypatch, tmp_path):
    with node_folder.hold_shared_folder("run", fill_and_note(tmp_path / "notes")):
        theirs = left(disk)
        monkeypatch.setattr(node_folder, "gethostname", lambda: "another")
        monkeypatch.setattr(node_folder, "_release_folder", lambda *_: pytest.fail("it is of another node"))
        node_folder.remove_unused()
        assert left(disk) == theirs
        monkeypatch.undo()


def test_a_folder_that_others_can_open_is_not_used(disk):
    disk.mkdir(mode=0o755)
    disk.chmod(0o755)
    with node_folder.hold_shared_folder("run", lambda folder: None) as folder:
        assert folder.parent.name.startswith(f"{disk.name}-")
        assert folder.parent.stat().st_mode & 0o077 == 0
    assert not list(disk.iterdir())


@pytest.mark.parametrize(("value", "why"), [(None, "TMPDIR is not set"), ("/nowhere/at/all", "TMPDIR is not a folder")])
def test_the_parent_folder_without_a_usable_tmpdir_is_tmp_with_the_reason(monkeypatch, value, why):
    monkeypatch.delenv("TMPDIR", raising=False)
    if value:
        monkeypatch.setenv("TMPDIR", value)
    assert node_folder.choose_parent_folder() == (Path("/tmp"), why)


@pytest.fixture
def staged(tmp_path, monkeypatch):
    """The folder of a run that copies its data to the node. The id of the run is a prefix of other run ids. A test that uses
    this fixture fails if the code calls time.sleep."""
    folder = RunDir(tmp_path / "runs/x-r1")
    folder.path.mkdir(parents=True)
    run = Run(
        schema=1, run_id="x-r1", matrix="m", cell=CELL, cell_hash="", repeat=1, attempt=1, launcher="fork", rehearsal=True,
        world=World(1, 2, 2), cluster={}, data_path="", data_stage="node", versions={}, git_commit=None, templates={},
        created="",
    )  # fmt: skip
    files.write_json(folder.run_json, run)
    monkeypatch.setattr(node_processes.time, "sleep", lambda _: pytest.fail("waits"))
    return folder


@pytest.mark.parametrize("other", ["runs/x-r10", "other/runs/x-r1"])
def test_the_end_of_a_run_does_not_wait_for_the_copy_of_another_run(disk, staged, tmp_path, other):
    name = node_folder.make_shared_folder_name(tmp_path / other)
    with node_folder.hold_shared_folder(name, lambda folder: None):
        node_processes.remove_data_copies(staged)
    assert left(disk) == []


def test_the_end_of_a_run_waits_for_the_ranks_that_still_use_its_copy(disk, staged, tmp_path):
    name = node_folder.make_shared_folder_name(staged.path)
    with node_folder.hold_shared_folder(name, lambda folder: None), pytest.raises(pytest.fail.Exception, match="waits"):
        node_processes.remove_data_copies(staged)


def test_the_end_of_a_run_that_cannot_be_read_is_no_failure(disk, staged):
    staged.run_json.write_text("{")
    node_processes.remove_data_copies(staged)
