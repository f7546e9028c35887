"""Which tests run side by side: pytest-xdist gives its workers units of tests, those that take long first.

- All tests on practice nodes are one unit: they share one cluster. They mostly wait, so the other units run beside them.
- Each test of a SPREAD file is a unit: such a test takes long and shares no fixture with the others.
- The tests of a file BY_PARAMETER are one unit for each parameter of their common fixture, such as a study.
- The tests of any other file are one unit: they share the fixtures of their file, and run in its order.
"""

from __future__ import annotations

import os
from pathlib import PurePath

import pytest
from xdist.scheduler import LoadScopeScheduling

NODES = "practice nodes"
ON_PRACTICE_NODES = (
    "test_practice_line",
    "test_practice_hindered_line",
    "test_slurm_line",
    "test_slurm_launchers",
    "test_slurm_jump_line",
    "test_site_line",
    "test_ssh_line",
    "test_cloudlab_line",
)
BY_PARAMETER = ("test_papers_line",)
SPREAD = ("test_jobs_line", "test_launchers_line", "test_trainers_checkpoints", "test_trainers_proof")
FIRST = (
    NODES,
    "test_papers_line",
    "test_ssh_separate_folders_line",
    "test_trainers",
    "test_jobs",
    "test_launchers",
    "test_line",
    "test_shell",
    "test_report",
)


class Units(LoadScopeScheduling):
    """The scheduler of pytest-xdist that keeps the tests of a unit on one worker, with our units.

    Not its `loadgroup`: xdist 3.8 writes the group into the id of a test, which pytest 9.2 does not take over.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


def unit(test: str) -> str:
    """The unit of a test, by its id."""
    file = _file(test)
    if file in ON_PRACTICE_NODES:
        return NODES
    if file in BY_PARAMETER:
        return file + test.partition("[")[2]
    return test if file in SPREAD else file


def must_be_on_practice_nodes(test: str) -> None:
    """A test that uses practice nodes outside their unit would start a second cluster beside the first."""
    assert unit(test) == NODES, f"{test} uses practice nodes: name its file in ON_PRACTICE_NODES of {__file__}"


def place(test: str) -> int:
    """By which tests are sorted: units that take long come first."""
    name = NODES if unit(test) == NODES else _file(test)
    return next((index for index, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))


def workers() -> int:
    """One for each core, and one for the practice nodes, whose tests mostly wait."""
    return len(os.sched_getaffinity(0)) + 1


def _file(test: str) -> str:
    return PurePath(test.partition("::")[0]).stem


def on_worker(config: pytest.Config) -> bool:
    """Whether this is a process in which pytest-xdist runs tests."""
    return hasattr(config, "workerinput")
