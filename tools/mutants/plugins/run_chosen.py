"""A pytest plugin that runs only the chosen tests, in the given order. It writes to files which test runs now and which test
failed."""

import json
import os
from pathlib import Path

import pytest

CHOSEN = {name: place for place, name in enumerate(json.loads(Path(os.environ["MUTANTS_CHOSEN"]).read_text()))}
RUNNING = Path(os.environ["MUTANTS_RUNNING"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items[:] = sorted((item for item in items if item.nodeid in CHOSEN), key=lambda item: CHOSEN[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    RUNNING.write_text(item.nodeid)
    return (yield)


def pytest_collectreport(report):
    if report.failed:
        RUNNING.with_suffix(".failed").write_text(report.nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        RUNNING.with_suffix(".failed").write_text(report.nodeid)
