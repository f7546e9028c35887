"""A pytest plugin that tells coverage which test runs now, also in the processes that the test starts.

The set-up of a fixture that several tests share is recorded separately: the lines that it runs count for every test that uses
the fixture.

The recorded time of a test is divided by the load per processor, so that a recording of a busy machine resembles that of an
idle machine.
"""

import json
import os

import pytest
import start_coverage

TESTS = {}
FIXTURES = {}


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
    start_coverage.enter(item.stash[CONTEXT])
    try:
        return (yield)
    finally:
        start_coverage.enter("")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function":
        return (yield)
    before = start_coverage.CONTEXT.read_text()
    key = f"{fixturedef.baseid}::{fixturedef.argname}"
    start_coverage.enter(FIXTURES.setdefault(key, f"f{len(FIXTURES)}"))
    try:
        return (yield)
    finally:
        start_coverage.enter(before)


def pytest_runtest_logreport(report):
    test = TESTS[report.nodeid]
    test["seconds"] += report.duration / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if report.outcome != "passed":
        test["outcome"] = report.outcome


def pytest_runtest_logfinish():
    (start_coverage.DATA / "tests.json").write_text(json.dumps({"tests": TESTS, "fixtures": FIXTURES}))


CONTEXT = pytest.StashKey[str]()
