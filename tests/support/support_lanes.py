"""Decides which tests run in parallel: pytest-xdist distributes units of tests to its workers, the slowest units first.

- The tests on practice nodes are the units of ON_PRACTICE_NODES, which run side by side on two workers. The tests of such a
  unit share one cluster, so they run one after another. They mostly wait, so the other units run beside them.
- Each test of a SPREAD file is a unit: these tests are slow and share no fixture with other tests.
- The tests of a file in BY_PARAMETER form one unit for each parameter of their common fixture, such as a study.
- The tests of any other file are one unit: they share the fixtures of their file, and run in the order of the file, or with
  --shuffle in random order (tests/support/support_order.py).
"""

from __future__ import annotations

import os

import pytest
from support_tiers import QUICK, split
from xdist.scheduler import LoadScopeScheduling

NODES = "practice nodes: "
# The unit of each file whose tests need practice nodes. Each unit takes about half of the time.
ON_PRACTICE_NODES = {
    "test_practice_e2e": f"{NODES}1",
    "test_practice_hindered_e2e": f"{NODES}1",
    "test_practice_link": f"{NODES}1",
    "test_site_e2e": f"{NODES}1",
    "test_cloudlab_e2e": f"{NODES}2",
    "test_slurm_e2e": f"{NODES}2",
    "test_slurm_faults_e2e": f"{NODES}2",
    "test_slurm_launchers": f"{NODES}2",
    "test_slurm_jump_e2e": f"{NODES}2",
    "test_ssh_e2e": f"{NODES}2",
    "test_trace_e2e": f"{NODES}2",
}
BY_PARAMETER = ("test_papers_e2e",)
SPREAD = ("test_jobs_e2e", "test_launchers_e2e", "test_checkpoints", "test_trainers_proof")
FIRST = (  # starts of the names of practice nodes, and of paths in tests/
    NODES,
    "e2e/test_papers_e2e",
    "e2e/test_ssh_separate_folders_e2e",
    "trainers/",
    "jobs/",
    "e2e/test_launchers_e2e",
    "e2e/test_quickstart_e2e",
    "shardlab/terminal/test_shell",
    "collect/report/",
)


class Units(LoadScopeScheduling):
    """A pytest-xdist scheduler that runs all tests of a unit on one worker.

    We do not use xdist's `loadgroup`: xdist 3.8 writes the group into the id of a test, which pytest 9.2 does not accept.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


def unit(test: str) -> str:
    """The unit of the test with this id."""
    file = split(test)[0]
    if file in ON_PRACTICE_NODES:
        return ON_PRACTICE_NODES[file]
    if file in BY_PARAMETER:
        return file + test.partition("[")[2]
    return test if file in SPREAD else file


def must_be_on_practice_nodes(test: str) -> None:
    """Fail if this test is not in a unit of ON_PRACTICE_NODES.

    A test that uses practice nodes in another unit would start one more cluster.
    """
    assert split(test)[0] in ON_PRACTICE_NODES, f"{test} uses practice nodes: name its file in ON_PRACTICE_NODES of {__file__}"


def place(test: str) -> int:
    """The sort key of tests: slow units come first."""
    name = ON_PRACTICE_NODES.get(split(test)[0], test.removeprefix("tests/"))
    return next((index for index, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))


def workers(tier: str | None) -> int:
    """The number of workers: one for each core; two more for the slow tier, whose two units on practice nodes mostly wait."""
    return len(os.sched_getaffinity(0)) + 2 * (tier != QUICK)


def on_worker(config: pytest.Config) -> bool:
    """Whether this process is a pytest-xdist worker, which runs tests."""
    return hasattr(config, "workerinput")
