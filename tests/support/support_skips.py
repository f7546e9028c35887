"""A pytest plugin: in CI, a test that is skipped for a reason that is not in the table ALLOWED fails.

CI runs on a machine where `make test` and `make test-all` install all that their tests need. If a test is skipped there, a
check is lost, and without this plugin nobody notices. Outside CI nothing changes: a test whose tool is absent is skipped and
the summary says so.

The plugin changes the report of the test itself. pytest-xdist sends the reports of its workers to its controller, so the
plugin works with pytest-xdist too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
CI = os.environ.get("CI", "").lower() not in ("", "0", "false")


class AllowedSkip(NamedTuple):
    """A skip that CI accepts.

    test: a pattern of test ids.
    reason: a regular expression that matches the whole reason of the skip.
    why: why CI accepts it.
    """

    test: str
    reason: str
    why: str


NO_GPU_WANTED = "the test is about machines without a GPU"
ALLOWED = (
    AllowedSkip("tests/project/test_gpu_proof.py::*", "has a GPU: .*", NO_GPU_WANTED),
    AllowedSkip("tests/collect/sampler/test_collect_sampler.py::*", "this machine has a GPU", NO_GPU_WANTED),
    AllowedSkip(
        "tests/jobs/planner/test_planner_network.py::*", "only in the long form", "a busy machine would change the times"
    ),
    AllowedSkip(
        "tests/project/test_light_install.py::*", "only in the long form", "it takes minutes and two more releases of Debian"
    ),
    AllowedSkip(
        "tests/e2e/test_quickstart_e2e.py::test_the_report_opens_in_a_browser",
        "no chromium: .*",
        "`make test` installs no Chromium; test_report_browser.py opens reports in `make test-all`",
    ),
    AllowedSkip(
        "tests/jobs/planning/test_papers.py::test_the_quotes_of_claims_*",
        "SHARDLAB_STUDY_TEXTS: .*",
        "the project does not carry the texts of the studies",
    ),
    AllowedSkip(
        "tests/provision/operations/test_apt_lists.py::*",
        "needs the package lists .*",
        "an image may come without the lists of apt",
    ),
)


def is_allowed(test: str, reason: str) -> bool:
    """Whether the table ALLOWED allows this skip."""
    return any(fnmatchcase(test, entry.test) and re.fullmatch(entry.reason, reason, re.DOTALL) for entry in ALLOWED)


def _fail_if_not_allowed(report: Report) -> Report:
    """Change the report of a skipped test into a failure if the table ALLOWED does not allow the skip."""
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = _reason(report)
        if not is_allowed(report.nodeid, reason):
            report.outcome = "failed"
            allowed = "Allowed in CI: the skips that tests/support/support_skips.py lists."
            report.longrepr = f"{report.nodeid} was skipped in CI: {reason}. {allowed}"
    return report


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason that the test gave, without pytest's prefix."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return said.removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _fail_if_not_allowed((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _fail_if_not_allowed((yield))
