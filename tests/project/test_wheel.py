"""The wheel of shardlab is complete: installed light into an empty environment, its commands work in an empty folder.

The module also holds what the commands say if a package of shardlab is hidden or overwritten by a stranger's.
"""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from shardlab import PACKAGES

ROOT = Path(__file__).parents[2]
COMMANDS = ("shardlab", "provision", "jobs", "collect")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory):
    """The folder of the commands of an environment in which the wheel is installed without extras."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    _pip(folder / "bin", wheel)
    return folder / "bin"


def _pip(bin_folder, *words):
    environment = os.environ | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    command = [bin_folder / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *words]
    subprocess.run(command, env=environment, check=True)


def _run(bin_folder, folder, *words, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [bin_folder / words[0], *words[1:]]
    return subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True)


def test_the_wheel_has_every_file_of_the_packages_and_the_constraints(wheel):
    tracked = subprocess.run(["git", "ls-files", "--", *PACKAGES], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not in a git checkout")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    present = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    assert present | {"shardlab/constraints.txt"} <= packed


def test_commands_of_the_wheel_work_in_an_empty_folder(bin_folder, tmp_path):
    described = _run(bin_folder, tmp_path, "provision", "init")
    assert described.returncode == 0, described.stderr
    (tmp_path / "cluster.yaml").write_text(described.stdout)
    for words in (
        ["provision", "plan"],
        ["jobs", "plan", "--matrix", "paper1"],
        ["collect", "--help"],
        ["shardlab", "schema", "matrix"],
    ):
        done = _run(bin_folder, tmp_path, *words)
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout
    assert "Traceback" not in done.stderr


def test_a_package_in_pythonpath_that_hides_ours_is_named(bin_folder, tmp_path):
    """A machine-learning project often has its own package `trainers` or `jobs`, and PYTHONPATH names the project."""
    for package in PACKAGES:
        folder = tmp_path / f"project with {package}"
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise SystemExit('imported the wrong package')\n")
        if package == "shardlab":  # the check itself is in this package
            continue
        for command in COMMANDS if package == "jobs" else ("jobs",):
            done = _run(bin_folder, tmp_path, command, "--version", PYTHONPATH=f"{folder}:/elsewhere")
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr == (
                f"error: {folder / package} hides shardlab's package {package}, which has the same name; "
                "write this before the command: PYTHONPATH=/elsewhere\n"
            )
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "jobs").mkdir()  # a folder without __init__.py hides nothing
    assert _run(bin_folder, tmp_path, "jobs", "--version", PYTHONPATH=str(tmp_path / "plain")).returncode == 0


def test_a_module_in_the_current_folder_that_hides_ours_is_named(tmp_path):
    """`python -m` searches the current folder first."""
    (tmp_path / "trainers.py").touch()
    done = subprocess.run([sys.executable, "-m", "shardlab", "jobs", "matrices"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path / 'trainers.py'} hides shardlab's package trainers, which has the same name; run the command in "
        "another folder\n"
    )


def test_a_distribution_that_overwrote_our_files_is_named(wheel, tmp_path):
    """pip installs a package of the same name over ours without a word."""
    project = tmp_path / "project"
    (project / "collect").mkdir(parents=True)
    (project / "collect" / "__init__.py").write_text("print 'a module of Python 2'\n")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "collect"\nversion = "1"\n'
    )
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=project, check=True)
    venv.create(tmp_path / "environment", with_pip=True)
    bin_folder = tmp_path / "environment" / "bin"
    _pip(bin_folder, "--no-deps", wheel)
    _pip(bin_folder, "--no-deps", tmp_path / "collect-1-py2.py3-none-any.whl")
    done = _run(bin_folder, tmp_path, "collect", "--version")
    assert done.returncode == 2
    assert done.stderr == (
        "error: the package collect overwrote files of shardlab's package collect. Uninstall collect, then install shardlab "
        "again, in an environment of its own.\n"
    )
