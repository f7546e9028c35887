"""Wheels that are copied to a GPU machine: a wheel is unpacked only if its package is missing there."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
USE = """
import importlib.util, json, pathlib, subprocess, sys
import wheels
wheels.MODULES = {"there": "json", "Not-There": "not_there"}
found = wheels.use(pathlib.Path(sys.argv[1]))
import not_there
child = subprocess.run([sys.executable, "-c", "import not_there; print(not_there.NAME)"], capture_output=True, text=True)
print(json.dumps([found, not_there.NAME, child.stdout.strip()]))
"""


def use(folder):
    command = [sys.executable, "-c", USE, folder]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(GPU)}, capture_output=True, text=True, check=False)


def wheel(folder, name, members):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return path


def test_a_package_that_is_missing_is_unpacked_also_for_processes_that_are_started(tmp_path):
    wheel(tmp_path, "not_there", {"not_there.py": "NAME = 'brought along'"})
    wheel(tmp_path, "there", {"json.py": "raise RuntimeError('the package that is there is used')"})
    done = use(tmp_path)
    assert json.loads(done.stdout) == [["not_there"], "brought along", "brought along"], done.stderr


@pytest.mark.parametrize(
    ("tags", "fits"), [("cp310-cp310", False), ("cp39-abi3", True), ("cp399-abi3", False), ("py2.py3-none", True)]
)
def test_a_wheel_for_another_python_is_left_alone(tmp_path, tags, fits):
    wheel(tmp_path, "not_there", {"not_there.py": "NAME = 'brought along'"}).rename(tmp_path / f"not_there-1.0-{tags}-any.whl")
    done = use(tmp_path)
    assert (done.returncode == 0) == fits, done.stderr
    assert fits or "No module named 'not_there'" in done.stderr


@pytest.mark.parametrize("member", ["../outside.py", "/tmp/outside.py"])
def test_a_wheel_that_would_write_outside_its_folder_is_refused(tmp_path, member):
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "not_there", {member: "x = 1"})
    done = use(folder)
    assert done.returncode == 1
    assert "holds a path outside of it" in done.stderr
    assert not (tmp_path / "outside.py").exists()
