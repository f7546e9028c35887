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
    "trainers/*.py::*",
    "jobs/planning/test_batch_search_runs.py::*",
    "project/test_benchmarks.py::test_a_benchmark_ends_and_prints_its_figures*",
    "provision/cloudlab/test_nodes.py::test_traffic_on_the_control_network_is_noticed_by_the_kernels_counters",
    "project/test_contributing.py::test_the_tests_of_all_examples_pass_together",
    "project/test_extras.py::test_the_table_has_each_module_of_each_extra_of_pyproject",
    "project/test_fake_cuda.py::*",
    "project/test_gpu_proof.py::*",
    "project/test_several_gpus.py::*",
    "jobs/test_damaged.py::*",
    "e2e/test_jobs_from_archive.py::*",
    "jobs/rendering/test_frozen_source.py::test_a_run_that_waits_trains_with_the_source_that_it_was_submitted_with",
    "jobs/supervisor/test_held.py::*",
    "jobs/planning/test_rehearsals.py::test_a_plan_rehearses_own_strategies_and_stores_the_answers",
    "jobs/verbs/test_trace.py::test_trace_runs_of_64_ranks_equal_the_analysis_of_one_process",
    "jobs/test_without_torch.py::test_plans_and_dry_runs_work_without_torch",
    "jobs/test_without_torch.py::test_rehearsals_run_on_the_cluster_which_has_torch",
    "shardlab/cluster/test_login_node.py::test_training_on_a_login_node_needs_the_option_here",
    "shardlab/matrix/test_model_file.py::test_a_shipped_name_and_a_fault_of_a_model_are_reported_at_their_place",
    "shardlab/matrix/test_model_file.py::test_runs_of_a_model_carry_its_configuration_and_need_no_trust",
    "shardlab/matrix/test_model_file.py::test_the_page_shows_the_plan_of_its_model",
    "trainers/plugins/test_own_faults.py::*",
    "jobs/plugins/test_own_strategies.py::*",
    "jobs/plugins/test_own_workloads.py::*",
    "jobs/plugins/test_own_plugins.py::*",
    "provision/nodes/test_here.py::test_apply_makes_the_changes_and_a_second_apply_finds_none",
    "collect/traces/test_gloo.py::*",
    "collect/traces/test_phases.py::test_the_phases_of_a_real_training_agree_with_its_annotations",
    "shardlab/workspace/test_trust.py::*",
    # whole studies and runs, end to end
    "e2e/test_clock_e2e.py::*",
    "e2e/test_jobs_e2e.py::*",
    "e2e/test_launchers_e2e.py::*",
    "e2e/test_quickstart_e2e.py::*",
    "e2e/test_node_copy_e2e.py::*",
    "e2e/test_own_models_e2e.py::*",
    "e2e/test_own_strategies_e2e.py::*",
    "e2e/test_papers_e2e.py::*",
    "e2e/test_played_gpus_e2e.py::*",
    "e2e/test_track_e2e.py::*",
    "e2e/test_readme_e2e.py::*",
    "e2e/test_tutorial_e2e.py::*",
    "e2e/test_unwatched_e2e.py::*",
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
