"""A rank with a memory limit runs out of memory at this limit, as on a smaller GPU, and the run says so."""

import pytest

pytest_plugins = ["support_trainers"]
LIMIT = {"memory_limit_gib": 0.125, "steps": 1, "prove": "off"}


def test_a_run_below_its_memory_limit_completes(bench):
    assert bench.complete(global_batch_size=8, **LIMIT).read_result().state == "completed"


@pytest.mark.parametrize(("strategy", "gpus"), [("single", 1), ("ddp", 2)])
def test_a_run_above_its_memory_limit_is_out_of_memory(bench, strategy, gpus):
    run_dir = bench.run_dir(strategy=strategy, gpus=gpus, global_batch_size=512, **LIMIT)
    code, errors = bench.finish(run_dir)
    assert code == 1, errors
    events = [event.event for event in run_dir.read_events()]
    assert "oom" in events, (errors, events)


def test_the_same_run_without_a_memory_limit_completes(bench):
    assert bench.complete(global_batch_size=512, steps=1).read_result().state == "completed"
