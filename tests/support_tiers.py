"""Decides which tests are quick and which are slow: `make test` runs the quick tests, `make test-all` the slow tests.

A test is slow if SLOW_FILES names its file, or if SLOW_TESTS names the test; all other tests are quick. `pytest` without the
option `--tier` runs both. Slow tests are those that train much, boot practice nodes, or need a package of Debian:
`make test` takes at most 8 minutes on 2 cores, and needs neither root nor packages of the system.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

import pytest

QUICK, SLOW = "quick", "slow"
# File -> names of its tests that are quick nevertheless. A name is that of a function, for all of its cases, or of one case.
SLOW_FILES: dict[str, tuple[str, ...]] = {}
# File -> names of its tests that are slow.
SLOW_TESTS: dict[str, tuple[str, ...]] = {}
COLLECTED = pytest.StashKey[
    frozenset[str]
]()  # the ids of all tests that were collected, before tests of the other tier were left out


def split(test: str) -> tuple[str, str]:
    """The file of a test, without folder and suffix, and the name of the test with its parameters. test: its id."""
    file, _, name = test.partition("::")
    return PurePath(file).stem, name


def tier(test: str) -> str:
    """The tier of the test with this id: QUICK or SLOW."""
    file, name = split(test)
    names = {name, name.partition("[")[0]}
    if file in SLOW_FILES:
        return SLOW if names.isdisjoint(SLOW_FILES[file]) else QUICK
    return SLOW if not names.isdisjoint(SLOW_TESTS.get(file, ())) else QUICK


def is_without_tests(file: str, selected: str | None) -> bool:
    """Whether pytest need not import this file, because the selected tier has no test of it. selected: None for both tiers."""
    if selected == QUICK:
        return SLOW_FILES.get(file) == ()
    return selected == SLOW and file not in SLOW_FILES and file not in SLOW_TESTS


def missing_names(collected: Iterable[str]) -> list[str]:
    """FILE::NAME of each name in the table that no collected test has. Files without any collected test are left out."""
    collected_names: dict[str, set[str]] = {}
    for test in collected:
        file, name = split(test)
        collected_names.setdefault(file, set()).update((name, name.partition("[")[0]))
    listed = [(file, name) for table in (SLOW_FILES, SLOW_TESTS) for file, names in table.items() for name in names]
    return [f"{file}::{name}" for file, name in listed if name not in collected_names.get(file, {name})]


def add_option(parser: pytest.Parser) -> None:
    """Add the option --tier."""
    parser.addoption("--tier", choices=(QUICK, SLOW), help="run only the tests of this tier (tests/support_tiers.py)")


def deselect_other_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are not of the tier that --tier selects."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    selected = config.getoption("--tier")
    left_out = [item for item in items if selected is not None and tier(item.nodeid) != selected]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if tier(item.nodeid) == selected]
