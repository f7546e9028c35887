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
    "test_environments_e2e": (),
    "test_cloudlab_e2e": (),
    "test_command_libraries_e2e": (),
    "test_command_e2e": (
        "test_an_unchanged_script_is_compared_under_two_options",
        "test_the_folder_of_the_script_stays_as_it_was",
    ),
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
    "test_slurm_faults_e2e": (),
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
    "test_several_gpus": (),
    "test_damaged": (),
    "test_held": (),
    "test_rehearsals": (),
    "test_own_faults": (),
    "test_own_rehearsals": (),
    "test_own_strategies": (),
    "test_own_workloads": (),
    "test_own_plugins": (),
    "test_gloo": (),
    "test_phases": (),
    "test_bytes": (),
    "test_checkpoints": ("test_a_run_resumes_in_its_own_folder",),
    "test_checksums": (
        "test_checksums_of_two_ranks_add_up_to_those_of_one_process[fsdp1]",
        "test_checksums_of_two_ranks_add_up_to_those_of_one_process[fsdp2]",
        "test_gradients_of_a_wrong_scale_are_other_work_and_the_parameter_is_named",
        "test_incomplete_checksums_prove_nothing_and_say_why",
        "test_outside_of_a_run_nothing_is_imported_and_nothing_is_written",
    ),
    "test_configured": (),
    "test_count_model": (),
    "test_own_counts": (),
    "test_host_memory": (),
    "test_memory_rehearsed": (),
    "test_deferred_init": (),
    "test_ends": (),
    "test_fake_gpus": (),
    "test_trainers_faults": (),
    "test_forking": (),
    "test_trainers_gpu": (),
    "test_trainers_instruments": (),
    "test_join": (),
    "test_memory_limit": ("test_a_run_above_its_memory_limit_is_out_of_memory[single-1]",),
    "test_trainers_model_options": (),
    "test_model_parallel": (),
    "test_parameter_server": (),
    "test_precision": (),
    "test_trainers_proof": (),
    "test_rehearsal": (),
    "test_same_work": (  # one strategy of each engine
        "test_a_strategy_does_the_work_of_one_process_and_sends_what_theory_says[ddp]",
        "test_a_strategy_does_the_work_of_one_process_and_sends_what_theory_says[fsdp1-full-shard]",
        "test_a_strategy_does_the_work_of_one_process_and_sends_what_theory_says[fsdp2]",
        "test_a_strategy_does_the_work_of_one_process_and_sends_what_theory_says[zero2]",
        "test_a_strategy_does_the_work_of_one_process_and_sends_what_theory_says[tp]",
        "test_a_strategy_does_the_work_of_one_process_and_sends_what_theory_says[pp-1f1b]",
        "test_a_strategy_does_the_work_of_one_process_and_sends_what_theory_says[ps-sync]",
        "test_the_comparison_can_fail",
    ),
    "test_trainers_separate_folders": (),
    "test_sharding": (),
    "test_validation": (),
    "test_trainers_wire": (),
    "test_workloads": (),
    "test_wire_between_hosts": (),
    "test_world_check": (),
    # browsers, and other programs of the system
    "test_full_disk": (),
    "test_collect_sampler_gpu": ("test_a_machine_without_a_gpu_has_no_gpu_field",),
    "test_killed": (),
    "test_commands": (),
    "test_tables": (
        "test_a_table_of_cells_comes_with_hidden_tools_and_the_facets_of_each_row",
        "test_a_key_with_many_values_or_with_one_has_no_check_boxes",
    ),
    "test_shell_init": (
        "test_on_a_terminal_verbs_of_jobs_reach_our_command[bash]",
        "test_words_and_exit_code_pass_through[bash]",
        "test_bash_survives_strict_mode",
        "test_the_real_command_answers[bash]",
        "test_our_command_is_found_again_from_any_folder",
        "test_an_unknown_shell_prints_the_menu",
        "test_completion_of_a_broken_workspace_prints_no_error",
        "test_the_command_shardlab_refuses_unknown_words",
    ),
    "test_pictures": (),
    "test_small_multiples": (),
    "test_light_install": (),
    "test_node_transfer": (),
    "test_sshd": (),
    "test_report_browser": (),
    "test_hta": (),
    "test_watch_browser": (),
    # whole models, many processes
    "test_batch_search_slurm": (),
    "test_batch_search_ssh": (),
    "test_fetch_cut": (),
    "test_contributing": (),
    "test_memory": (),
    "test_planner_network": (),
    "test_ssh_separate_folders": (),
    "test_sent_bytes": (),
    "test_slurm_attempt": (),
    "test_wheel": (),
    "test_without_torch": (),
}
# File -> names of its tests that are slow: they take long, or need a program that `make system` installs.
SLOW_TESTS: dict[str, tuple[str, ...]] = {
    "test_nodes": ("test_traffic_on_the_control_network_is_noticed_by_the_kernels_counters",),
    "test_advice": ("test_advice_for_a_configuration_and_for_a_workload_of_the_workspace",),
    "test_archive": (
        "test_a_long_file_is_archived_without_reading_it_as_a_whole",
        "test_code_of_an_archive_is_executed_only_with_trust",
    ),
    "test_archive_names": (
        "test_an_anonymous_archive_does_not_depend_on_the_login",
        "test_a_login_equal_to_a_word_of_the_records_changes_no_record",
    ),
    "test_exports": (
        "test_latex_compiles_and_fits_the_page",
        "test_pdflatex_typesets_special_characters_as_they_are",
    ),
    "test_interfaces": (
        "test_an_interface_that_is_renamed_keeps_its_count",
        "test_an_interface_that_is_made_again_gives_no_number",
    ),
    "test_collect_interrupted": (
        "test_a_fetch_continues_after_the_disk_was_full",
        "test_a_fetch_continues_after_the_connection_breaks",
    ),
    "test_prune": ("test_nodes_are_freed_of_the_parts_that_the_first_node_has",),
    "test_nic": ("test_the_ioctl_reads_a_driver_that_the_kernel_has",),
    "test_collect_traces": ("test_a_study_of_hta_is_compared_with_the_installed_hta",),
    "test_track": (
        "test_a_run_whose_records_are_replaced_is_logged_anew",
        "test_the_tracker_ends_with_its_parent_and_a_restart_replaces_its_log",
        "test_all_trackers_hold_the_run_as_its_export_does",
    ),
    "test_extras": (
        "test_a_verb_without_a_needed_package_names_the_extra_to_install",
        "test_the_printed_command_installs_from_this_checkout_with_this_python",
    ),
    "test_installation": (
        "test_an_environment_that_does_not_work_heals",
        "test_pip_unpacks_in_the_temporary_folder_if_it_has_room",
        "test_the_environment_of_a_moved_checkout_is_made_anew",
        "test_an_installation_prints_its_size_first_and_keeps_a_working_environment",
        "test_the_environment_of_hta_heals_too",
        "test_a_disk_without_room_is_refused_before_anything_is_installed",
    ),
    "test_frozen_source": ("test_a_run_that_waits_trains_with_the_source_that_it_was_submitted_with",),
    "test_runner": ("test_the_runner_starts_waiting_runs_and_no_claimed_runs",),
    "test_trace": ("test_trace_runs_of_64_ranks_equal_the_analysis_of_one_process",),
    "test_wait_for_gpus": (
        "test_a_gpu_that_the_run_does_not_take_may_be_used",
        "test_a_rehearsal_on_the_cpu_does_not_look",
        "test_a_run_that_waits_for_gpus_starts_when_other_processes_end",
        "test_a_run_whose_gpu_is_used_fails_and_names_the_gpu_and_the_process",
        "test_a_task_of_a_slurm_job_looks_at_its_own_node",
        "test_an_old_driver_lists_the_processes_of_each_gpu",
    ),
    "test_model_file": (
        "test_the_page_shows_the_plan_of_its_model",
        "test_runs_of_a_model_carry_its_configuration_and_need_no_trust",
        "test_a_shipped_name_and_a_fault_of_a_model_are_reported_at_their_place",
    ),
    "test_own_data": ("test_every_strategy_trains_on_the_same_items_in_the_same_order",),
    "test_own_plans": ("test_strategies_that_divide_the_model_do_the_work_of_one_process",),
    "test_own": (
        "test_a_rehearsal_never_needs_less_than_the_lower_bound",
        "test_a_model_without_blocks_is_rehearsed_above_its_lower_bound",
        "test_descriptions_have_the_parameters_of_each_block",
    ),
    "test_practice_network": ("test_a_node_that_is_removed_does_not_change_the_address_of_this_machine",),
    "test_releases": ("test_without_cgroups_v2_only_the_release_of_this_machine_is_allowed",),
    "test_aside": (
        "test_nodes_know_one_anothers_keys_and_other_lines_stay",
        "test_without_root_nodes_know_one_another_by_the_users_own_files",
        "test_a_key_with_a_passphrase_is_kept_and_reported",
        "test_a_damaged_block_of_our_lines_stops_the_change",
    ),
    "test_here": (
        "test_a_command_past_its_limit_ends_with_its_child_processes",
        "test_apply_makes_the_changes_and_a_second_apply_finds_none",
    ),
    "test_nvidia": ("test_a_compiled_function_with_other_results_is_noticed",),
    "test_record_fuzz": ("test_a_hostile_value_stops_no_command_and_reaches_no_other_run",),
    "test_remote": (
        "test_accept_new_stores_an_unknown_host_key_and_refuses_a_changed_one",
        "test_an_unknown_host_key_stops_with_the_fingerprint_that_openssh_prints",
    ),
    "test_replaced_files": ("test_every_command_ends_with_a_sentence",),
    "test_container": (
        "test_a_rank_runs_in_a_container_of_charliecloud",
        "test_the_packages_of_an_image_are_checked_before_anything_is_sent_to_slurm",
    ),
    "test_ssh_login": (
        "test_a_key_with_a_passphrase_without_a_terminal_gives_working_advice",
        "test_a_login_without_agent_and_key_names_the_missing_key",
        "test_output_of_a_bashrc_is_no_part_of_an_answer",
        "test_the_advice_for_a_reinstalled_machine_removes_its_old_host_key",
    ),
    "test_scheduler": (
        "test_all_tasks_end_before_the_end_is_recorded",
        "test_two_runs_share_no_node_and_start_in_order",
        "test_a_killed_runner_does_not_free_the_nodes_of_its_runs",
        "test_a_run_of_another_workspace_waits_for_the_node",
        "test_a_run_waits_for_a_node_that_does_not_answer_and_starts_when_it_does",
    ),
    "test_surroundings": (
        "test_the_surroundings_change_no_result",
        "test_nothing_is_writable_by_everybody_whatever_the_umask",
    ),
    "test_foreign": ("test_hta_gives_the_same_for_every_shape",),
    "test_result": (
        "test_the_loss_of_a_tiny_workload_falls_by_a_quarter",
        "test_an_engine_finishes_in_the_last_step_before_its_parameters_are_read",
        "test_fsdp2_reports_the_sharding_and_dtypes_in_effect",
    ),
    "test_trust": (
        "test_trust_prints_the_files_and_applies_only_to_these_files",
        "test_answers_about_code_from_another_person_are_not_used",
        "test_bytecode_beside_code_is_removed_before_the_code_is_executed",
        "test_a_script_that_waits_is_started_only_after_trust",
    ),
    "test_order": ("test_workers_of_xdist_use_the_seed_of_the_main_process",),
    "test_without_root": ("test_changes_that_need_no_root_are_made_by_the_user",),
    "test_planner_golden": (
        "test_the_advice_for_three_machines_is_the_golden_text",
        "test_the_shipped_matrices_are_adapted_with_the_golden_changes",
    ),
    "test_slurm_limits": (
        "test_attempts_that_a_retry_had_no_room_for_go_with_the_next",
        "test_a_full_queue_gets_as_many_runs_as_have_ended",
    ),
    "test_papers": ("test_a_plan_marks_cells_that_this_machine_cannot_hold_and_submit_refuses_them",),
    "test_failure_cause": ("test_the_signal_that_ended_a_rank_is_read_from_the_output_of_torchrun",),
    "test_adapted_matrix": (
        "test_the_adapted_study_fits_and_lists_every_difference[paper1-1-2]",
        "test_the_adapted_study_fits_and_lists_every_difference[paper1-1-4]",
        "test_the_adapted_study_fits_and_lists_every_difference[paper2-1-2]",
        "test_the_adapted_study_fits_and_lists_every_difference[paper2-1-4]",
        "test_the_adapted_study_fits_and_lists_every_difference[paper3-1-2]",
        "test_the_adapted_study_fits_and_lists_every_difference[paper3-1-4]",
        "test_the_adapted_study_fits_and_lists_every_difference[paper4-1-2]",
        "test_the_adapted_study_fits_and_lists_every_difference[paper4-1-4]",
    ),
    "test_sample_cache": ("test_frames_and_damage_are_the_same_with_and_without_the_cache",),
    "test_sample_cache_hostile": ("test_each_byte_that_was_changed_is_noticed",),
    "test_docs_site": (
        "test_links_lead_to_pages_and_headings",
        "test_pages_load_nothing_from_the_web",
    ),
}
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
    parser.addoption("--tier", choices=(QUICK, SLOW), help="run only the tests of this tier (tests/support/support_tiers.py)")


def deselect_other_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are not of the tier that --tier selects."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    selected = config.getoption("--tier")
    left_out = [item for item in items if selected is not None and tier(item.nodeid) != selected]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if tier(item.nodeid) == selected]
