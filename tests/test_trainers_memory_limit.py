"""A rank with a memory limit runs out of memory at this limit, as on a smaller GPU, and the run says so."""

import pytest

pytest_plugins = ["support_trainers"]
LIMIT = {"memory_limit_gib": 0.125, "steps": 1, "prove": "off"}


def test_what_fits_under_the_limit_runs(bench):
    assert bench.complete(global_batch_size=8, **LIMIT).read_result().state == "completed"


@pytest.mark.parametrize(("strategy", "gpus"), [("single", 1), ("ddp", 2)])
def test_what_does_not_fit_is_out_of_memory(bench, strategy, gpus):
    run_dir = bench.run_dir(strategy=strategy, gpus=gpus, global_batch_size=512, **LIMIT)
    code, errors = bench.finish(run_dir)
    assert code == 1, errors
    events = [event.event for event in run_dir.events()]
    assert "oom" in events, (errors, events)


def test_without_a_limit_it_would_have_fitted(bench):
    assert bench.complete(global_batch_size=512, steps=1).read_result().state == "completed"
