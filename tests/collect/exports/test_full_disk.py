"""Exports to a disk that is full: each export fails with a message of one sentence, and the previous export stays unchanged."""

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import support_browser
import support_collect as support
from support_long import only_long

from collect import export
from collect.cli import main
from shardlab.workspace.workspace import Workspace

SIZE = 32 * 2**20
PAGE = 4096
PICTURES = {"png", "svg"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("small"))
    support.keep(workspace, [support.cell()], repeats=1)
    support.save_snapshot(support.completed(workspace, support.cell()), {"segments": [], "device_traces": [[]]})
    return workspace


@pytest.fixture
def disk(tmp_path):
    """The folder of a small file system that is mounted for this test. Skips the test if mounting is not possible."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def exported(workspace, name, out):
    return main(["export", "--to", name, "--workspace", str(workspace.path), "--out", str(out)])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def taken(folder: Path) -> int:
    """The number of bytes that the files of a folder occupy on the disk."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*"))


@contextlib.contextmanager
def only(free: int, disk: Path):
    """Fill the disk while the `with` block runs, so that at most `free` bytes (whole pages) are free."""
    filled = disk / "filled"
    with filled.open("wb", buffering=0) as handle:
        room = os.statvfs(disk).f_bavail * PAGE
        os.posix_fallocate(handle.fileno(), 0, max(room - free // PAGE * PAGE, 1))
    assert os.statvfs(disk).f_bavail * PAGE <= free
    yield
    filled.unlink()


CASES = [(name, part) for name in sorted(export.load_export_formats().keys() - PICTURES) for part in (0, 0.9)]
DRAWN = [
    pytest.param(name, part, marks=support_browser.needed) for name, part in (("svg", 0.5), *only_long(("png", 0)))
]  # exports of pictures are tested in few cases, because they start a browser, which is slow


@pytest.mark.parametrize(("name", "part"), [*CASES, *DRAWN])
def test_an_export_to_a_full_disk_is_one_sentence_and_keeps_the_old_export(workspace, disk, capfd, name, part):
    out = disk / "out"
    assert exported(workspace, name, out) == 0
    before, needed = content(out), taken(out)
    assert before
    assert needed
    capfd.readouterr()
    with only(int(part * needed), disk):
        assert exported(workspace, name, out) == 1
        said = capfd.readouterr()
    assert said.out == ""
    sentence = rf"error: cannot write {out}(/[\w./-]*)?: the disk is full; free some space and run the same command again\.\n"
    assert re.fullmatch(sentence, said.err), said.err
    assert content(out) == before
    assert [path.name for path in disk.iterdir()] == ["out"]
    assert exported(workspace, name, out) == 0, "with room again, the same command succeeds"


@pytest.mark.parametrize("part", [0, 0.5, 0.9])
def test_a_report_to_a_full_disk_is_one_sentence_and_keeps_the_old_report(workspace, disk, capfd, part):
    out = disk / "report"
    command = ["summarize", "--workspace", str(workspace.path), "--out", str(out)]
    assert main(command) == 0
    before = content(out)
    capfd.readouterr()
    with only(int(part * taken(out)), disk):
        assert main(command) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert re.fullmatch(rf"error: cannot write {out}(/[\w./-]*)?: the disk is full; .*\.\n", said.err), said.err
    assert content(out) == before
    assert [path.name for path in disk.iterdir()] == ["report"]
