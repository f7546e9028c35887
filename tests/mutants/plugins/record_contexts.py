"""A pytest plugin that tells coverage which test runs now, also in the processes that the test starts.

The set-up of a fixture that several tests share is recorded separately: the lines that it runs count for every test that uses
the fixture.
"""

import json
import os
from pathlib import Path

import coverage
import pytest

TESTS = {}
FIXTURES = {}


def _enter(context):
    os.environ["MUTANTS_CONTEXT"] = context
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.switch_context(context)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    shared = [
        f"{definition.baseid}::{name}"
        for name, definitions in item._fixtureinfo.name2fixturedefs.items()
        for definition in definitions
        if definition.scope != "function"
    ]
    TESTS[item.nodeid] = {"fixtures": shared, "seconds": 0.0, "outcome": "passed"}
    item.stash[CONTEXT] = f"t{len(TESTS) - 1}"
    _enter(item.stash[CONTEXT])
    try:
        return (yield)
    finally:
        _enter("")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function":
        return (yield)
    before = os.environ["MUTANTS_CONTEXT"]
    key = f"{fixturedef.baseid}::{fixturedef.argname}"
    _enter(FIXTURES.setdefault(key, f"f{len(FIXTURES)}"))
    try:
        return (yield)
    finally:
        _enter(before)


def pytest_runtest_logreport(report):
    test = TESTS[report.nodeid]
    test["seconds"] += report.duration
    if report.outcome != "passed":
        test["outcome"] = report.outcome


def pytest_sessionfinish():
    Path(os.environ["MUTANTS_TESTS"]).write_text(json.dumps({"tests": TESTS, "fixtures": FIXTURES}))


CONTEXT = pytest.StashKey[str]()
