"""The option --shuffle of tests/support/support_order.py."""

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import support_order
from support_e2e import HANG_S


@pytest.fixture
def ran(tmp_path):
    """A function that runs 12 tests of three files. It returns (the ids of the tests in their order, the output)."""
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("\n".join(f"def test_{number}(): pass" for number in range(4)))

    def run(*options):
        plugins = ["-p", "xdist", "-p", "support_order", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *plugins, "-v", *options]
        paths = {"PYTHONPATH": str(Path(support_order.__file__).parent)}
        environment = os.environ | {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | paths
        done = subprocess.run(
            [*command, "--rootdir", tmp_path, tmp_path], capture_output=True, text=True, env=environment, timeout=HANG_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"^(\S+::\S+) PASSED", done.stdout, re.MULTILINE), done.stdout

    return run


def test_shuffle_prints_a_seed_that_repeats_the_order(ran):
    in_order, _ = ran()
    drawn, output = ran("--shuffle=new")
    (seed,) = re.findall(r"--shuffle=(\d+)", output)
    assert ran(f"--shuffle={seed}")[0] == drawn
    assert sorted(drawn) == in_order
    assert len([name for name, _ in groupby(drawn, key=lambda test: test.partition("::")[0])]) == 3
    orders = {tuple(ran(f"--shuffle={number}")[0]) for number in (1, 2)}
    assert len(orders | {tuple(in_order)}) == 3


def test_workers_of_xdist_use_the_seed_of_the_main_process(ran):
    _, output = ran("--shuffle=new", "-n", "2")  # xdist stops with an error if its workers collect tests in different orders
    assert output.count("PASSED") == 12
