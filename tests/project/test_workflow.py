"""The workflow for GitHub, as far as it can be checked here: its commands are commands of this repository."""

import re
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from provision.software import PYTHON_RANGE

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
JOBS = WORKFLOW["jobs"]
IMAGES = {"debian:bookworm": "3.11", "debian:trixie": "3.13", "ubuntu:24.04": "3.12"}  # the version of their package python3


def commands(job):
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_make_has_the_targets_that_the_workflow_makes():
    wanted = {target for job in JOBS for line in commands(job) for target in re.findall(r"^make ([a-z-]+)", line)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert "test" in wanted <= targets


@pytest.mark.parametrize("path", re.findall(r"tests/[\w/]+\.py", " ".join(commands("light"))))
def test_the_files_that_the_workflow_tests_are_there(path):
    assert (ROOT / path).is_file()


def test_each_python_is_new_enough():
    versions = JOBS["light"]["strategy"]["matrix"]["python"]
    versions += [IMAGES[entry["image"]] for entry in JOBS["test"]["strategy"]["matrix"]["include"]]
    assert [version for version in versions if version not in SpecifierSet(PYTHON_RANGE)] == []


def test_root_trusts_the_checkout_before_the_tests_ask_git():
    lines = commands("test")
    trusted = next(place for place, line in enumerate(lines) if "--system --add safe.directory" in line)
    assert trusted < next(place for place, line in enumerate(lines) if line.startswith("make test"))
