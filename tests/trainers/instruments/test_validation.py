"""Validation uses the same items with every strategy, measures what the model has learned, and does not change the training."""

import json

import pytest
from support_document_keys import wrong
from support_long import only_long

from shardlab.matrix.cell import Instruments, Optimizer, Validation
from shardlab.runs.record import ValidationRecord, read_records

pytest_plugins = ["support_trainers"]
EVERY_5 = Instruments(validation=Validation(every_steps=5, items=40))


def records(run_dir):
    lines = run_dir.validation_file.read_text().splitlines() if run_dir.validation_file.exists() else []
    assert [said for line in lines for said in wrong("runs/RUN_ID/validation.jsonl", json.loads(line))] == []
    return read_records(run_dir.validation_file, ValidationRecord).records


@pytest.fixture(scope="module")
def reference(bench):
    return records(bench.complete(instruments=EVERY_5, steps=12))


def test_validation_runs_every_n_steps_and_at_the_end(reference):
    """Validation runs after every 5th step and after the last step, always on the same number of items."""
    assert [record.step for record in reference] == [5, 10, 12]
    assert {record.items for record in reference} == {40}


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        ("ddp", {}),
        ("fsdp1-full-shard", {}),
        ("fsdp2", {"accumulation": 2}),
        ("zero3", {}),
        ("tp", {"dp": 1, "tp": 2}),
        ("pp-1f1b", {"dp": 1, "pp": 2, "accumulation": 2}),
        ("pp-interleaved", {"dp": 1, "pp": 2, "accumulation": 2}),
        ("pp-fsdp2", {"gpus": 4, "dp": 2, "pp": 2, "accumulation": 2}),
        ("ps-sync", {"servers": 1}),
    ],
)
def test_strategies_come_to_the_same_loss_and_accuracy(bench, reference, strategy, keys):
    found = records(bench.complete(**{"strategy": strategy, "gpus": 2, "instruments": EVERY_5, "steps": 12, **keys}))
    assert [record.step for record in found] == [5, 10, 12]
    for ours, theirs in zip(found, reference, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)
        assert ours.accuracy == pytest.approx(theirs.accuracy, abs=2e-3)


def test_validation_changes_no_loss_of_a_step(bench):
    """Training with validation has the same losses as training without it."""
    assert bench.losses(instruments=EVERY_5) == bench.losses()


def test_asynchronous_workers_do_not_wait_for_each_other_to_be_validated(bench):
    found = records(bench.complete(strategy="ps-async", gpus=2, servers=1, instruments=EVERY_5, steps=12))
    assert [record.step for record in found] == [12]


@pytest.mark.parametrize("workload", ["vit-tiny", *only_long("resnet50-tiny")])
def test_a_learnable_task_reaches_a_high_accuracy(bench, workload):
    run_dir = bench.complete(
        workload=workload,
        global_batch_size=32,
        steps=120,
        optimizer=Optimizer(name="adamw", lr=2e-3),
        instruments=Instruments(validation=Validation(every_steps=60, items=320)),
    )
    result = run_dir.read_result()
    assert result.final_accuracy > 0.9
    assert result.final_accuracy == records(run_dir)[-1].accuracy
    assert result.instruments["validation"]["cost_s"] > 0


def test_less_than_a_batch_of_items_is_refused(bench):
    run_dir = bench.run_dir(instruments=Instruments(validation=Validation(every_steps=5, items=7)))
    code, errors = bench.finish(run_dir)
    assert code == 1
    assert "7 validation items do not fill a global batch of 8" in errors


# Maps the number of a step to the mean loss in nats that is expected in this step. An untrained model has a loss of ln 512 =
# 6.24.
CURVE = {1: 6.24, 20: 3.8, 40: 1.7, 60: 1.2}


def test_the_loss_of_the_language_twin_follows_its_known_curve(bench):
    losses = bench.losses(
        workload="gpt2-large-tiny", global_batch_size=32, steps=60, optimizer=Optimizer(name="adamw", lr=3e-3)
    )
    for step, expected in CURVE.items():
        assert losses[step - 1] == pytest.approx(expected, abs=0.4), step
    assert min(losses) > 0.9  # no model can reach a loss below the entropy of the rule that generates the tokens
