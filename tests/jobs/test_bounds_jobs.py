"""Limits of the package jobs: a value exactly at the limit is allowed or likely, and the next value is not."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from support_bounds import check_limit, is_allowed, refusal
from support_cells import CELL

from jobs.node import hang_detection
from jobs.planner import advise, planner_table, predict, rules
from jobs.planner.advise import Advice
from jobs.planning import gpu_hours
from jobs.slurm import submission
from jobs.submission import backlog, preflight
from jobs.verbs import plan, shared_options, trace_runs
from shardlab.runs.prediction import PredictedRange, Prediction
from shardlab.workspace.workspace import Workspace

GIB = 1_073_741_824
CAPACITY = PredictedRange(75, 79, 80)


class Rest:
    """Stands for everything that a command uses after it has checked its options."""

    def __init__(self, arguments):
        self.arguments = arguments

    def __getattr__(self, name):
        raise NotImplementedError(f"past the check: {name}")


def per_run(count):
    message = refusal(trace_runs.find_trace_runs, Rest(Namespace(folder=".", per_run=count)))
    assert message in (f"--per-run: found {count}. Allowed: 1 to 100000.", "past the check: cluster")
    return message == "past the check: cluster"


def scale_out(count):
    """Whether --scale-out may name this number of GPUs, for a plan without cells in a workspace without runs."""
    invocation = SimpleNamespace(arguments=Namespace(scale_out=str(count)), workspace=Workspace(Path("/nonexistent")))
    planned = SimpleNamespace(context=SimpleNamespace(cluster=SimpleNamespace(name="none")), cells=[])
    return is_allowed(plan.scale_out_cells, invocation, planned, says="Allowed: numbers of GPUs from 1 to 1000000")


def wait_gpus(seconds):
    return is_allowed(shared_options.read_wait_gpus_s, Namespace(wait_gpus=seconds), says="Allowed: 0 to 604800 seconds.")


def hours(bound):
    """Whether runs of 7.5 GPU hours, and 15 with retries, may be submitted with --max-gpu-hours."""
    found = gpu_hours.CellHours(
        CELL, gpu_hours.RunTime(9000.0, "recorded times"), occupied_gpus=3, most_retries=gpu_hours.MostRetries(1, 2)
    )
    return is_allowed(gpu_hours.must_be_within_gpu_hours, bound, [found], says="--max-gpu-hours")


def agrees(throughput):
    rule = SimpleNamespace(recommends=["ddp"])
    return rules._judge_rule(rule, {"ddp": throughput}, 100.0).agrees


# What is limited: (whether a value is allowed, allowed values up to the limit, values beyond it).
LIMITS = {
    "--wait-gpus": (wait_gpus, (0, 604_800), (-1, 604_801)),
    "--per-run": (per_run, (1, 100_000), (0, 100_001)),
    "--scale-out": (scale_out, (1, 1_000_000), (0, 1_000_001)),
    "--max-gpu-hours": (hours, (15.0,), (14.999,)),
    "throughput of a rule that agrees": (agrees, (95.0, 100.0), (94.999,)),
}


@pytest.mark.parametrize("what", LIMITS)
def test_the_values_at_a_limit_are_allowed_and_the_next_are_not(what):
    check_limit(*LIMITS[what])


@pytest.mark.parametrize(
    ("needed", "fits"),
    [
        ((70, 72, 75), "yes"),  # the highest need is the lowest capacity
        ((70, 72, 75.01), "likely"),
        ((70, 79, 90), "likely"),  # the likely need is the likely capacity
        ((70, 79.01, 90), "unlikely"),
        ((80, 85, 90), "unlikely"),  # the lowest need is the highest capacity
        ((80.01, 85, 90), "no"),
    ],
)
def test_a_need_exactly_at_a_capacity_fits_it(needed, fits):
    assert predict.judge_fit(PredictedRange(*needed), CAPACITY, is_complete=True) == fits
    assert predict.judge_fit(PredictedRange(*needed), CAPACITY, is_complete=False) == ("no" if fits == "no" else None)


def test_a_memory_limit_lowers_a_capacity_and_never_raises_it():
    machine = SimpleNamespace(gpu_memory_bytes=PredictedRange(75 * GIB, 79 * GIB, 80 * GIB), on_gpu=True)
    lowered = {78: (75, 78, 78), 75: (75, 75, 75), 80: (75, 79, 80), 81: (75, 79, 80), None: (75, 79, 80)}
    for limit, expected in lowered.items():
        cell = msgspec.structs.replace(CELL, memory_limit_gib=limit)
        assert msgspec.structs.astuple(predict.find_gpu_capacity(cell, machine)) == tuple(size * GIB for size in expected)


@pytest.mark.parametrize(("throughput", "group"), [(95.0, 1), (94.99, 2)])
def test_a_tie_has_at_least_95_percent_of_the_highest_throughput(throughput, group):
    fast, slow = (
        Advice(msgspec.structs.replace(CELL, strategy=strategy), Prediction(step_s=PredictedRange(1, 1, 1)), items_per_s)
        for strategy, items_per_s in (("ddp", 100.0), ("fsdp2", throughput))
    )
    assert [entry.group for entry in advise._rank_candidates([slow, fast])] == [1, group]


@pytest.mark.parametrize(("bytes_", "text"), [(GIB / 10, "0.1 GiB"), (GIB / 10 - 1, "102.4 MiB"), (0, "0.0 MiB")])
def test_a_size_is_in_mib_only_below_a_tenth_of_a_gib(bytes_, text):
    assert planner_table.format_size(bytes_) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.9994, "999 ms"), (1, "1 s"), (59.94, "59.9 s"), (60, "1m 00s")])
def test_a_duration_changes_its_unit_at_a_second_and_at_a_minute(seconds, text):
    assert planner_table.format_duration(seconds) == text


def test_the_pause_after_failed_tries_doubles_up_to_ten_minutes():
    pause, waits = backlog._Pause(5.0), []
    for _ in range(9):
        waits.append(pause._wait_s)
        pause.start_again(has_failed=True)
    assert waits == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    pause.start_again(has_failed=False)
    assert pause._wait_s == 5


def test_a_sentence_names_up_to_its_most_and_counts_the_rest():
    assert hang_detection._format_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert hang_detection._format_ranks(range(9)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"
    runs = [SimpleNamespace(cell=SimpleNamespace(name=lambda number=number: f"cell{number}")) for number in range(6)]
    assert "(cell0, cell1, cell2, cell3, cell4): no." in preflight.describe_rejection(runs[:5], "no")
    assert "(cell0, cell1, cell2, cell3, cell4 and 1 more): no." in preflight.describe_rejection(runs, "no")


@pytest.mark.parametrize(("count", "commands"), [(20, 0), (21, 2)])
def test_the_remedy_of_a_damaged_submission_names_twenty_runs_in_a_line(tmp_path, monkeypatch, count, commands):
    monkeypatch.setattr(submission, "_is_left_open", lambda *_, **__: True)
    for repeat in range(1, count + 1):
        (tmp_path / "runs" / f"ddp-gpt2-tiny-g2-b8-2255b0937cfb-r{repeat}").mkdir(parents=True)
    text = submission._describe_damage_and_remedy(Workspace(tmp_path), "TOKEN", "a file cannot be read")
    assert text.count("\n  jobs cancel ") == commands
    assert text.count("2255b0937cfb-r") >= count
