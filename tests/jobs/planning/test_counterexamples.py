"""Tests of claims are false in counterexamples, which were written from the quotes: another strategy is larger, the direction
is the other one, the gain is zero, or a strategy that the sentence names does not follow it."""

import functools

import pytest

from shardlab.matrix import matrix
from shardlab.matrix.expression import Expression

FULL, HYBRID, NONE = "fsdp1-full-shard", "fsdp1-hybrid-shard", "fsdp1-no-shard"
# Values by strategy and number of GPUs, or by strategy, in which the claim holds; then changes of which each makes it false.
MEMORY = {FULL: 85, HYBRID: 50, NONE: 60, "zero0": 45, "zero1": 25, "zero2": 25, "zero3": 30}
TRAFFIC = {FULL: 10, NONE: 11, HYBRID: 14, "zero0": 15, "zero1": 16, "zero2": 20, "zero3": 17}
PROCESSORS = {FULL: 22, "zero0": 78, "zero1": 76, "zero2": 79, "zero3": 40}
SPEED = {(FULL, 4): 113, ("zero2", 4): 100, ("zero3", 4): 100, (FULL, 8): 200, ("zero2", 8): 190, ("zero3", 8): 190}
WEIGHTS = {"single": 100, "ddp": 100, ("zero3", 2): 195, ("zero3", 4): 150}
SENT = {("ddp", 2): 8, ("ddp", 4): 24, ("zero2", 2): 8, ("zero2", 4): 24, ("zero3", 2): 12, ("zero3", 4): 36, "parameters": 1}
CASES = {
    "p1-full-shard-most-memory": (MEMORY, *({name: 90} for name in MEMORY if name != FULL)),
    "p1-zero-stages-least-memory": (MEMORY, {"zero1": 55}, {"zero2": 80}, {HYBRID: 90}, {"zero0": 20}),
    "p1-deepspeed-30-less-memory": (
        {FULL: 100, "zero2": 75, "zero3": 72}, {"zero3": 40}, {"zero2": 110}, {"zero2": 100, "zero3": 100}, {"zero2": 40},
    ),
    "p1-deepspeed-more-network": (
        TRAFFIC, {"zero0": 30}, {"zero1": 5}, {"zero3": 5}, {NONE: 18}, {FULL: 100}, dict.fromkeys(TRAFFIC, 10),
    ),
    "p1-full-shard-least-network": (TRAFFIC, {NONE: 2000}, {FULL: 16}, {HYBRID: 5}, {"zero2": 5}),
    "p1-deepspeed-more-cpu": (PROCESSORS, {FULL: 2, "zero2": 5}, {FULL: 60}, {"zero0": 20}, {"zero1": 100}),
    "p1-deepspeed-scales-better": (SPEED, {("zero2", 8): 150}, {("zero3", 8): 150}, {(FULL, 8): 226}),
    "p3-async-up-to-28": ({"ps-sync": 100, "ps-async": 74}, {"ps-async": 100}, {"ps-async": 99}, {"ps-async": 40}),
    "p3-fsdp-4-6x-memory": ({"ddp": 50, FULL: 10}, {FULL: 50}, {FULL: 300}, {FULL: 5}),
    "p3-modified-slower-than-async": ({"ps-ssp": 200, "ps-async": 100}, {"ps-ssp": 100}, {"ps-ssp": 50}),
    "p3-gpu-use-comparable": ({"ddp": 90, FULL: 88}, {FULL: 60}, {"ddp": 60}),
    "p5-parameters-twice": (WEIGHTS, {("zero3", 2): 100}, {("zero3", 4): 100}, {"single": 200}, {("zero3", 2): 300}),
    "p5-control-like-ddp": ({"single": 100, "ddp": 101}, {"ddp": 1}, {"ddp": 120}, {("ddp", 4): 200}),
    "p5-other-memory-same": ({"ddp": 100, "zero3": 100}, {"zero3": 50}, {("zero3", 4): 150}),
    "p5-averaging-not-equivalent": (
        {"ddp": 6.5, "local-sgd": 6.2}, {"local-sgd": 6.5}, {("local-sgd", 2): 6.51}, {("local-sgd", 4): 6.49},
    ),
    "p5-averaging-no-overlap": ({"local-sgd": 0}, {("local-sgd", 2): 40}, {("local-sgd", 4): 40}),
    "p5-volume-ddp": (SENT, {("ddp", 2): 4}, {("ddp", 4): 12}),
    "p5-volume-zero2": (SENT, {("zero2", 4): 36}, {("zero2", 2): 4}, {("ddp", 2): 16}),
    "p5-volume-zero3": (SENT, {("zero3", 2): 8}, {("zero3", 4): 24}),
}  # fmt: skip


@functools.cache
def study(number):
    return matrix.load_matrix(matrix.find_matrix_file(f"paper{number}")).file


def holds(claim_id, values):
    """Whether the test of a claim holds if all its metrics have these values."""
    (test,) = (Expression(claim.test) for claim in study(claim_id[1]).claims if claim.id == claim_id)

    def value_of(metric):
        def look_up(strategy, gpus=None, **_others):
            return values[metric] if metric in values else values.get((strategy, gpus), values.get(strategy))

        return look_up

    return test.evaluate({}, {metric: value_of(metric) for metric in test.calls})


@pytest.mark.parametrize("claim_id", CASES)
def test_a_claim_holds_in_its_example_and_in_no_counterexample(claim_id):
    example, *counterexamples = CASES[claim_id]
    assert holds(claim_id, example)
    assert [changes for changes in counterexamples if holds(claim_id, example | changes)] == []


def test_the_claims_of_study_3_have_the_verdicts_of_its_own_numbers():
    """Its notes say which claims on printed numbers fail: the slowdown and the gain."""
    file = study(3)
    printed = {
        (entry.metric, entry.cell["strategy"], entry.cell["workload"], entry.cell["gpus"]): float(entry.printed.strip("%s>"))
        for entry in file.reported
        if entry.metric in ("train_time_s", "final_accuracy_pct")
    }
    failing = []
    for claim in file.claims:
        test = Expression(claim.test)
        if test.calls <= {"train_time_s", "final_accuracy_pct"}:
            calls = {
                metric: lambda strategy, workload, gpus, metric=metric: printed[metric, strategy, workload, gpus]
                for metric in test.calls
            }
            failing += [claim.id] * (not test.evaluate({}, calls))
    assert failing == ["p3-fsdp-2-3x-slower", "p3-async-up-to-28"]
