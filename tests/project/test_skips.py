"""In CI, a skipped test fails unless a table allows the skip. A test also fails there if its practice cluster cannot be
prepared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import support_skips
import support_torch
from support_practice import are_archives_away

TESTS = Path(__file__).parents[1]
SKIPPING = """
import pytest
def test_that_passes(): pass
def test_without_a_tool(): pytest.skip("zsh is not installed here")
@pytest.mark.skipif(True, reason="zsh is not installed here")
def test_with_a_mark(): pass
@pytest.fixture
def cluster(): pytest.skip("no cluster")
def test_with_a_fixture(cluster): pass
@pytest.mark.xfail
def test_that_is_known_to_fail(): raise AssertionError
"""
WHOLE_FILE = 'import pytest\npytest.skip("no browser", allow_module_level=True)\n'
GPU = 'import pytest\n@pytest.mark.skipif(True, reason="this machine has a GPU")\ndef test_it(): pass\n'


def pytest_on(folder: Path, ci: str, *plugins: str) -> tuple[int, str]:
    """Runs pytest with the plugin support_skips on the tests in a folder. Returns (exit code, output). ci: the value of the
    environment variable CI. plugins: further plugins, which may be in the folder."""
    more = [word for plugin in ("support_skips", *plugins) for word in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", *more, "-p", "no:cacheprovider", "-rA", "--rootdir", folder]
    path = f"{Path(support_skips.__file__).parent}{os.pathsep}{folder}"
    environment = {**os.environ, "CI": ci, "PYTEST_ADDOPTS": "", "PYTHONPATH": path}
    done = subprocess.run([*command, folder], capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout


@pytest.fixture
def skipping(tmp_path):
    """A folder whose tests are skipped in every way that pytest offers."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_skipping.py").write_text(SKIPPING)
    (folder / "test_whole_file.py").write_text(WHOLE_FILE)
    (folder / "collect/sampler").mkdir(parents=True)
    (folder / "collect/sampler/test_collect_sampler.py").write_text(GPU)
    return folder


def test_in_ci_each_skip_that_the_table_does_not_list_fails_by_name(skipping):
    code, said = pytest_on(skipping.parent, "true")
    assert code == 2  # exit code 2: if a file cannot be collected, pytest stops before the first test
    assert "tests/test_whole_file.py was skipped in CI: no browser. Allowed in CI: the skips that" in said
    (skipping / "test_whole_file.py").unlink()
    code, said = pytest_on(skipping.parent, "true")
    assert code == 1
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 2 errors" in said
    for name, why in [
        ("test_without_a_tool", "zsh is not installed here"),
        ("test_with_a_mark", "zsh is not installed here"),
        ("test_with_a_fixture", "no cluster"),
    ]:
        assert f"tests/test_skipping.py::{name} was skipped in CI: {why}." in said
    assert "test_collect_sampler.py:2: this machine has a GPU" in said


@pytest.mark.parametrize("ci", ["", "0", "false"])
def test_outside_of_ci_skipped_tests_do_not_fail(skipping, ci):
    code, said = pytest_on(skipping.parent, ci)
    assert (code, "1 passed, 5 skipped, 1 xfailed" in said) == (0, True), said


@pytest.fixture
def without_torch(tmp_path):
    """A folder with tests, and with a plugin that hides torch."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (tmp_path / "no_torch.py").write_text("import sys\nsys.modules['torch'] = None\n")
    (folder / "test_imports.py").write_text("from torch.nn import Linear\ndef test_it(): pass\n")
    (folder / "test_other_import.py").write_text("import no_such_module\ndef test_it(): pass\n")
    (folder / "trainers/ranks").mkdir(parents=True)
    (folder / "trainers/ranks/test_ends.py").write_text("def test_it(): raise AssertionError\n")
    (folder / "test_light.py").write_text("def test_it(): pass\n")
    return tmp_path


def test_without_torch_only_tests_that_need_torch_are_skipped(without_torch):
    code, said = pytest_on(without_torch, "", "no_torch", "support_torch")
    assert code == 2
    assert "No module named 'no_such_module'" in said
    (without_torch / "tests/test_other_import.py").unlink()
    code, said = pytest_on(without_torch, "", "no_torch", "support_torch")
    assert (code, "1 passed, 2 skipped" in said) == (0, True), said
    assert said.count("needs torch") == 2


def test_in_ci_a_test_that_needs_torch_fails_without_torch(without_torch):
    (without_torch / "tests/test_other_import.py").unlink()
    code, said = pytest_on(without_torch, "true", "no_torch", "support_torch")
    assert code == 2
    assert "tests/test_imports.py was skipped in CI: needs torch." in said
    (without_torch / "tests/test_imports.py").unlink()
    code, said = pytest_on(without_torch, "true", "no_torch", "support_torch")
    assert "tests/trainers/ranks/test_ends.py::test_it was skipped in CI: needs torch." in said, said
    assert code == 1


def test_each_test_that_needs_torch_exists():
    for pattern in support_torch.NEED_TORCH:
        file, _, name = pattern.partition("::")
        files = list(TESTS.rglob(file))
        assert files, pattern
        assert name == "*" or f"def {name.removesuffix('*').partition('[')[0]}" in files[0].read_text(), pattern


@pytest.mark.parametrize(
    ("test", "reason", "allowed"),
    [
        ("tests/collect/sampler/test_collect_sampler.py::test_a[ddp]", "this machine has a GPU", True),
        ("tests/collect/sampler/test_collect_sampler.py::test_a[ddp]", "nccl is not installed", False),
        ("tests/shardlab/terminal/test_shell_init.py::test_a[zsh]", "zsh is not installed here", False),
        ("tests/collect/traces/test_hta.py::test_a", "no Python with HolisticTraceAnalysis is named in SHARDLAB_HTA", False),
        (
            "tests/provision/operations/test_aside.py::test_a",
            "no loop device: losetup: cannot find an unused loop device",
            False,
        ),
        ("tests/e2e/test_slurm_e2e.py::test_a", "practice nodes need root on this machine: sudo provision ...", False),
    ],
)
def test_only_tests_without_a_machine_in_ci_may_be_skipped(test, reason, allowed):
    assert support_skips.is_allowed(test, reason) is allowed


@pytest.mark.parametrize(
    ("said", "away"),
    [
        # These messages were recorded while no package archive answered debootstrap 1.0.128, apt-get 2.6.1 and pip 23.2.1.
        ("error: debootstrap failed: E: Failed getting release file http://127.0.0.1:9/debian/dists/bookworm/Release\n", True),
        ("note: making the base\nerror: chroot failed: E: Unable to locate package slurmd\n", True),
        ("error: /usr/bin/python3 failed: ERROR: No matching distribution found for torch==2.13.0\n", True),
        ("", False),
        ("error: practice nodes need root on this machine: sudo provision ...\n", False),
        ("error: chroot failed: useradd: user 'practice' already exists\n", False),
        ("Traceback (most recent call last):\n  ...\nOSError: E: Failed to fetch\n", False),
    ],
)
def test_only_unreachable_archives_excuse_a_practice_cluster_that_fails_to_start(said, away):
    assert are_archives_away(said) is away
