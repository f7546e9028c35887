"""A pytest plugin: where torch is not installed, tests that need it are skipped with the reason `needs torch`.

shardlab without torch is the light installation: it provisions, plans, submits to clusters, fetches and reports. Only a
machine that trains needs torch. A test needs torch if its module imports torch or another package of the extra `trainers`, or
if the table NEED_TORCH lists it: then the test starts processes that import torch.

In CI, where torch is installed, this plugin does nothing; a test with this reason would fail there (support_skips.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator
from fnmatch import fnmatchcase

import pytest

IS_HERE = importlib.util.find_spec("torch") is not None
REASON = "needs torch"
TRAINERS = ("torch", "torchvision", "transformers", "tokenizers", "deepspeed", "PIL")  # packages of the extra `trainers` only
# Files and names of tests that start processes which import torch.
NEED_TORCH = (
    "test_trainers_*.py::*",
    "test_batch_search_runs.py::*",
    "test_fake_cuda.py::*",
    "test_gpu_proof.py::*",
    "test_own_strategies.py::*",
    "test_own_workloads.py::*",
)


def needs_torch(test: str) -> bool:
    """Whether the table NEED_TORCH lists the test with this id."""
    return any(fnmatchcase(test, f"tests/{pattern}") for pattern in NEED_TORCH)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of the table NEED_TORCH if torch is not installed."""
    if not IS_HERE and needs_torch(item.nodeid):
        pytest.skip(REASON)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a module that cannot be imported because torch is not installed."""
    report = yield
    error = report.call.excinfo.value.__cause__ if report.failed and report.call.excinfo is not None else None
    if not IS_HERE and isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in TRAINERS:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {REASON}")
    return report
