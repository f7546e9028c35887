"""Tests of the digests of the packages and of the source. A run refuses to start if a digest has changed since the run was
submitted."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import support_folder_order

from shardlab.files import source_digest

PROGRAM = """
from shardlab.files import source_digest
print(source_digest.digest_installed_packages())
import setuptools
print(source_digest.digest_installed_packages())
"""


def test_a_process_that_imports_setuptools_has_the_digest_of_one_that_does_not():
    """When a process imports setuptools, setuptools adds a folder with its own copies of packages to sys.path. torch imports
    setuptools when it compiles. These copies must not change the digest of the packages."""
    if find_spec("setuptools") is None:  # not imported here: that fails if another test imported the old distutils of Python
        pytest.skip("setuptools is not installed")
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after


def test_folders_of_bytecode_are_not_listed(tmp_path, monkeypatch):
    """Another process may remove such a folder while it is listed, and then this process would fail."""
    (tmp_path / "jobs" / "__pycache__").mkdir(parents=True)
    (tmp_path / "jobs" / "plan.py").write_text("")
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(os.fspath(path)) or scandir(path))
    assert list(source_digest.list_source_files(["jobs"], tmp_path)) == [tmp_path / "jobs" / "plan.py"]
    assert listed == [str(tmp_path / "jobs")]


def test_the_digest_does_not_depend_on_the_order_in_which_folders_are_listed(tmp_path, monkeypatch):
    """A file system lists the names of a folder in an order of its own, and the login node and the nodes may have different
    file systems."""
    for name in ("plan.py", "cli.py", "slurm/query.py", "slurm/commands.py", "ssh/step.py"):
        (tmp_path / "jobs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "jobs" / name).write_text(name)
    reversed_folders = support_folder_order.reverse(monkeypatch)
    digests = [source_digest.digest_packages(["jobs"], tmp_path)]
    assert {tmp_path / "jobs", tmp_path / "jobs" / "slurm"} <= reversed_folders
    monkeypatch.undo()
    digests.append(source_digest.digest_packages(["jobs"], tmp_path))
    assert digests[0] == digests[1]
    assert [path.name for path in source_digest.list_source_files(["jobs"], tmp_path)] == [
        "cli.py", "plan.py", "commands.py", "query.py", "step.py",
    ]  # fmt: skip
