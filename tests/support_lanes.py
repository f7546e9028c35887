"""Which tests run side by side: pytest-xdist gets units of tests, the longest first, so that few workers wait at the end.

- All tests on practice nodes are one unit: they share one cluster. They mostly wait, so the other units run beside them.
- Each test of a SPREAD file is a unit: such a test takes long and shares no fixture with the others.
- The tests of any other file are one unit: they share the fixtures of their file, and run in its order.
"""

from __future__ import annotations

import os

import pytest

ON_PRACTICE_NODES = ("practice", "slurm")  # fixtures
SPREAD = ("test_papers_line", "test_jobs_line", "test_launchers_line", "test_trainers_checkpoints", "test_trainers_proof")
FIRST = ("practice nodes", "test_papers_line", "test_trainers", "test_jobs", "test_launchers", "test_shell", "test_report")


def name_unit(item: pytest.Item) -> None:
    """Tell pytest-xdist the unit of a test, while tests are collected: later pytest-xdist has read the units."""
    if _side_by_side() and (name := _unit(item)) != item.nodeid:
        item.add_marker(pytest.mark.xdist_group(name))


def sort(items: list[pytest.Item]) -> None:
    """Sort the tests, units that take long first, if pytest-xdist runs them side by side."""
    if _side_by_side():
        items.sort(key=lambda item: _place(_unit(item)))


def _side_by_side() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _unit(item: pytest.Item) -> str:
    if set(ON_PRACTICE_NODES) & set(getattr(item, "fixturenames", ())):
        return "practice nodes"
    return item.nodeid if item.path.stem in SPREAD else item.path.stem


def _place(name: str) -> int:
    return next((place for place, start in enumerate(FIRST) if name.removeprefix("tests/").startswith(start)), len(FIRST))


def workers() -> int:
    """One for each core, and one for the practice nodes, whose tests mostly wait."""
    return len(os.sched_getaffinity(0)) + 1
