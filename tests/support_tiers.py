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
SLOW_FILES: dict[str, tuple[str, ...]] = {
    # end to end
    "test_clock_e2e": (),
    "test_cloudlab_e2e": (),
    "test_jobs_e2e": (),
    "test_jobs_from_archive": (),
    "test_launchers_e2e": (),
    "test_node_copy_e2e": (),
    "test_own_models_e2e": (),
    "test_own_strategies_e2e": (),
    "test_papers_e2e": (),
    "test_played_gpus_e2e": (),
    "test_practice_e2e": (),
    "test_practice_hindered_e2e": (),
    "test_practice_link": (),
    "test_readme_e2e": (),
    "test_site_e2e": (),
    "test_slurm_e2e": (),
    "test_slurm_jump_e2e": (),
    "test_slurm_launchers": (),
    "test_ssh_e2e": (),
    "test_ssh_separate_folders_e2e": (),
    "test_trace_e2e": (),
    "test_track_e2e": (),
    "test_tutorial_e2e": (),
    "test_unwatched_e2e": (),
    # training in real ranks
    "test_batch_search_runs": (),
    "test_benchmarks": (),
    "test_fake_cuda": (),
    "test_gpu_proof": (),
    "test_jobs_damaged": (),
    "test_jobs_held": (),
    "test_jobs_rehearsals": (),
    "test_own_faults": (),
    "test_own_rehearsals": (),
    "test_own_strategies": (),
    "test_own_workloads": (),
    "test_traces_gloo": (),
    "test_traces_phases": (),
    "test_trainers_bytes": (),
    "test_trainers_checkpoints": ("test_a_run_resumes_in_its_own_folder",),
    "test_trainers_configured": (),
    "test_trainers_deferred_init": (),
    "test_trainers_ends": (),
    "test_trainers_fake_gpus": (),
    "test_trainers_faults": (),
    "test_trainers_forking": (),
    "test_trainers_gpu": (),
    "test_trainers_instruments": (),
    "test_trainers_join": (),
    "test_trainers_memory_limit": ("test_a_run_above_its_memory_limit_is_out_of_memory[single-1]",),
    "test_trainers_model_options": (),
    "test_trainers_model_parallel": (),
    "test_trainers_parameter_server": (),
    "test_trainers_precision": (),
    "test_trainers_proof": (),
    "test_trainers_rehearsal": (),
    "test_trainers_same_work": ("test_the_comparison_can_fail",),
    "test_trainers_separate_folders": (),
    "test_trainers_sharding": (),
    "test_trainers_validation": (),
    "test_trainers_wire": (),
    "test_trainers_workloads": (),
    "test_trainers_world_check": (),
    # browsers, and other programs of the system
    "test_collect_full_disk": (),
    "test_collect_pictures": (),
    "test_collect_small_multiples": (),
    "test_light_install": (),
    "test_report_browser": (),
    "test_traces_hta": (),
    "test_watch_browser": (),
    # whole models, many processes
    "test_batch_search_slurm": (),
    "test_contributing": (),
    "test_planner_memory": (),
    "test_planner_network": (),
    "test_ssh_separate_folders": (),
    "test_traces_sent_bytes": (),
}
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
