"""The light installation on other releases of Debian, by an ordinary user and with the Python of the release; long form only.

The root of a release is made with debootstrap. In it, the user alice, who is not root and has no sudo, installs shardlab from a
copy of this checkout, without torch and without a network, and runs some of the tests.
"""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support_contributing import copied
from support_long import LONG
from support_practice import are_archives_away
from support_releases import OTHERS
from support_skips import CI

from provision.practice import base
from provision.practice.base import PracticeNodeError

ROOT = Path(__file__).parents[2]
TOOLS = ("hypothesis", "jsonschema", "pytest", "pytest-xdist")
TESTS = (
    "cell", "cluster", "archive", "collect_cli", "verdicts", "console", "document", "expression",
    "golden_slurm", "menus", "matrix", "pretend", "record", "schemas", "slurm_states", "state",
)  # fmt: skip
INSTALL = "cd ~/shardlab; python3 -m venv .venv; .venv/bin/pip install --quiet --no-index --find-links /wheels"


@pytest.fixture(scope="module", params=OTHERS)
def root(request, tmp_path_factory):
    """The root of a release with a copy of the checkout, and with wheels of the packages of the light installation."""
    if not LONG:
        pytest.skip("only in the long form")
    made = tmp_path_factory.mktemp(request.param) / "root"
    try:
        base.check_machine(request.param)
        packages = "--include=python3,python3-venv"
        base.run_here(["debootstrap", "--variant=minbase", packages, request.param, str(made), base.find_mirror()])
        base.run_here(["chroot", str(made), "useradd", "--create-home", "--shell", "/bin/bash", "alice"])
        checkout = copied(made / "home/alice/shardlab")
        for name in ("LICENSE", "README.md", "constraints.txt"):
            shutil.copy(ROOT / name, checkout)
        base.run_here(["chroot", str(made), "chown", "--recursive", "alice:", "/home/alice"])
        python = as_alice(made, "python3 -c 'import sys; print(sys.version_info.major, sys.version_info.minor, sep=\".\")'")
        download_wheels(made / "wheels", python.stdout.strip())
    except PracticeNodeError as error:
        if CI or not are_archives_away(f"error: {error}"):
            raise
        pytest.skip(f"no package archives here: {error}")
    yield made
    shutil.rmtree(made)


def download_wheels(folder: Path, python: str) -> None:
    """Download the tested versions of all packages as wheels for another version of Python, such as 3.13."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build = pyproject["project"], pyproject["build-system"]["requires"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["report"], *build, "editables", *TOOLS]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", str(folder)]
    release = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    base.run_here([*pip, *release, f"--constraint={ROOT / 'constraints.txt'}", *wanted])


def as_alice(root: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script as alice in the root, without a network."""
    words = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--as-pid2", "--private-network", "--user=alice"]
    words += [f"--directory={root}", "sh", "-euc", script]
    return subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def test_an_ordinary_user_installs_the_light_part_and_its_tests_pass(root):
    done = as_alice(root, f"{INSTALL} --constraint constraints.txt --editable '.[report]' {' '.join(TOOLS)}")
    assert done.returncode == 0, done.stderr[-3000:]
    files = [str(path.relative_to(ROOT)) for name in TESTS for path in (ROOT / "tests").rglob(f"test_{name}.py")]
    done = as_alice(root, f"cd ~/shardlab; id -un; .venv/bin/pytest -q --color=no {' '.join(files)}")
    assert done.stdout.startswith("alice\n")
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 300, done.stdout[-1000:]
