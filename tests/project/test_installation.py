"""`make` installs: an environment that does not work is made anew, and what the installation takes is said before it begins.

The real make, venv and pip run in a copy of the Makefile beside a tiny project, whose installation takes seconds.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import support_tiny_project
from packaging.specifiers import SpecifierSet
from support_long import only_long

ROOT = Path(__file__).parents[2]
BASE_PYTHON = sys._base_executable


def run_make(folder, *words, **variables):
    """Run make in a folder, with pip confined to the wheels of the folder and to the environment there."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PIP_", "TORCH"))}
    confined = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels", "PIP_CONFIG_FILE": os.devnull, "PIP_REQUIRE_VIRTUALENV": "1"}
    command = ["make", "--no-print-directory", *words]
    if not any(word.startswith("PYTHON=") for word in words):
        command.append(f"PYTHON={BASE_PYTHON}")
    environment = {**inherited, **confined, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path):
    """A project whose installation brings the command `tool`."""
    folder = tmp_path / "a checkout"
    (folder / "wheels").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(support_tiny_project.__file__, folder)
    (folder / "pyproject.toml").write_text(support_tiny_project.PROJECT)
    (folder / "constraints.txt").write_text("tool==1.0\n")
    support_tiny_project.write_wheel(folder / "wheels", "tool")
    return folder


def install(folder):
    """Install, on a disk that has room for it."""
    done = run_make(folder, ".venv/installed", "VENV_GB=0", "DOWNLOAD_GB=0", TMPDIR="")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def says_of_tool(folder):
    return subprocess.run([folder / ".venv/bin/tool"], capture_output=True, text=True, check=True).stdout


def make_environment(folder, *words):
    subprocess.run([BASE_PYTHON, "-m", "venv", *words, ".venv"], cwd=folder, check=True)


def fail_in_ensurepip(folder):
    """The state that a missing package python3-venv leaves, and Ctrl-C before pip is unpacked."""
    make_environment(folder, "--without-pip")


def interrupt_ensurepip(folder):
    """The state after Ctrl-C while pip is being unpacked: its commands come last."""
    make_environment(folder)
    shutil.rmtree(next(folder.glob(".venv/lib/python3*/site-packages/pip/_internal")))
    for command in folder.glob(".venv/bin/pip*"):
        command.unlink()


def lose_configuration(folder):
    """The state after Ctrl-C in a recipe: make deletes the file that it was making. Without it, Python is the system's."""
    make_environment(folder)
    (folder / ".venv/pyvenv.cfg").unlink()


def remove_python(folder):
    make_environment(folder)
    for link in folder.glob(".venv/bin/python*"):
        link.unlink()
        link.symlink_to(folder / "a-python-that-is-gone")


def upgrade_python(folder):
    """The state after the system's python3 became another version: the packages are those of the version before."""
    make_environment(folder)
    next(folder.glob(".venv/lib/python3*")).rename(folder / ".venv/lib/python3.1")


def interrupt_pip(folder):
    """The state after Ctrl-C while pip compiles a package: its files are there, but neither its command nor pip's INSTALLER."""
    install(folder)
    (folder / ".venv/bin/tool").unlink()
    next(folder.glob(".venv/lib/python3*/site-packages/tool-1.0.dist-info/INSTALLER")).unlink()
    (folder / ".venv/installed").unlink()


@pytest.mark.parametrize(
    "break_environment",
    [interrupt_ensurepip, upgrade_python, interrupt_pip, *only_long(fail_in_ensurepip, lose_configuration, remove_python)],
)
def test_an_environment_that_does_not_work_heals(project, break_environment):
    break_environment(project)
    install(project)
    assert says_of_tool(project) == "this is tool\n"


def test_the_environment_of_a_moved_checkout_is_made_anew(project):
    install(project)
    moved = project.rename(project.with_name("moved"))
    install(moved)
    assert says_of_tool(moved) == "this is tool\n"


def test_an_installation_prints_its_size_first_and_keeps_a_working_environment(project):
    said = install(project).stdout
    size = said.index("Installing torch and some 90 packages into .venv: 0 GB, and 0 GB of downloads, unpacked in ")
    assert said[size:].split(" unpacked in ")[1].startswith(f"{project}/.cache/tmp;")
    assert size < said.index("The CPU build takes 2 GB: make .venv/installed TORCH=cpu") < said.index("Successfully installed")
    assert (project / "built-in").read_text().startswith(f"{project}/.cache/tmp")  # pip really unpacks there
    note = project / ".venv/note"
    note.touch()
    assert install(project).stdout == ""
    (project / "constraints.txt").touch()
    assert "Requirement already satisfied: tool" in install(project).stdout
    assert note.exists()


@pytest.mark.parametrize(("build", "sizes"), [("", ("6 GB", "3 GB")), ("cpu", ("2 GB", "1 GB"))])
def test_readme_names_the_sizes_that_make_names(project, build, sizes):
    planned = run_make(project, "--dry-run", ".venv/installed", f"TORCH={build}").stdout
    assert "into .venv: {}, and {} of downloads".format(*sizes) in planned
    readme = " ".join((ROOT / "README.md").read_text().split())
    cuda, cpu = re.search(r"CUDA build of torch: (.*?) \(CPU build: (.*?)\)", readme).groups()
    assert all(size in (cpu if build else cuda) for size in sizes)


@pytest.mark.parametrize("is_link", [True, False])
def test_an_environment_that_make_did_not_make_is_never_removed(project, is_link):
    """A link to an environment elsewhere, and an environment without pip in which somebody installed packages."""
    environment = project.parent / "theirs" if is_link else project / ".venv"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", environment], check=True)
    package = next(environment.glob("lib/python3*/site-packages")) / "theirs.py"
    package.touch()
    if is_link:
        (project / ".venv").symlink_to(environment)
    done = run_make(project, ".venv/pyvenv.cfg")
    assert done.returncode == 2
    assert (
        "error: .venv does not work here as an environment with pip, and make did not make it; remove it: rm -r .venv\n"
        in done.stderr
    )
    assert package.exists()


def test_the_environment_of_hta_heals_too(project):
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", ".venv-hta"], cwd=project, check=True)
    assert run_make(project, ".venv-hta/pyvenv.cfg").returncode == 0
    subprocess.run([project / ".venv-hta/bin/pip", "--version"], check=True, capture_output=True)


def test_a_python_that_cannot_make_environments_names_the_package_of_debian(project):
    hidden, wrapper = project / "hidden", project / "python"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys; sys.modules['ensurepip'] = None")
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH=hidden exec {BASE_PYTHON} "$@"\n')
    wrapper.chmod(0o755)
    done = run_make(project, ".venv/installed", "PYTHON=./python")
    assert done.returncode == 2
    assert "error: ./python cannot make environments; on Debian or Ubuntu, install its package first:" in done.stderr
    assert f"sudo apt install python3.{sys.version_info.minor}-venv\n" in done.stderr
    assert not (project / ".venv").exists()


def test_a_disk_without_room_is_refused_before_anything_is_installed(project):
    done = run_make(project, ".venv/installed", "VENV_GB=1000000")
    assert done.returncode == 2
    assert (
        "the installation takes 1000003 GB while it runs; free some, or take the CPU build: make .venv/installed TORCH=cpu\n"
        in done.stderr
    )
    assert not list(project.glob(".venv/lib/python3*/site-packages/tool*"))


@pytest.mark.parametrize(("needed_gb", "unpacks"), [(0, "elsewhere"), (1_000_000, "a checkout/.cache/tmp")])
def test_pip_unpacks_in_the_temporary_folder_if_it_has_room(project, tmp_path, needed_gb, unpacks):
    (tmp_path / "elsewhere").mkdir()
    words = (f"DOWNLOAD_GB={needed_gb}", f"VENV_GB={-needed_gb}")
    done = run_make(project, ".venv/installed", *words, TMPDIR=str(tmp_path / "elsewhere"))
    assert done.returncode == 0, done.stderr
    assert (project / "built-in").read_text().startswith(str(tmp_path / unpacks))


def test_the_tested_packages_run_on_the_first_release_of_the_oldest_python():
    """Debian 12 has Python 3.11.2: a package that needs 3.11.5 would let `make test` fail there."""
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    needs = {
        package.metadata["Name"]: package.metadata.get("Requires-Python")  # a package need not state it
        for package in importlib.metadata.distributions()
        if package.metadata["Name"].lower() in pinned and package.metadata.get("Requires-Python")
    }
    assert len(needs) > 50
    assert {name: need for name, need in needs.items() if not SpecifierSet(need).contains("3.11.0")} == {}
