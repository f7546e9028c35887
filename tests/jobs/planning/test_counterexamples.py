"""Tests of claims are false in counterexamples, which were written from the quotes: another strategy is larger, the direction
is the other one, the gain is zero, or a strategy that the sentence names does not follow it."""

import functools

import msgspec
import pytest

from collect.metric import load_metrics
from collect.verdicts import printed_number
from jobs.planning.resolve import resolve_cells
from shardlab.matrix import cell_names, matrix
from shardlab.matrix.expression import Expression

FULL, HYBRID, NONE = "fsdp1-full-shard", "fsdp1-hybrid-shard", "fsdp1-no-shard"
# Values by strategy and number of GPUs, or by strategy, in which the claim holds; then changes of which each makes it false.
MEMORY = {FULL: 85, HYBRID: 50, NONE: 60, "zero0": 45, "zero1": 25, "zero2": 25, "zero3": 30}
TRAFFIC = {FULL: 10, NONE: 11, HYBRID: 14, "zero0": 15, "zero1": 16, "zero2": 20, "zero3": 17}
PROCESSORS = {FULL: 22, "zero0": 78, "zero1": 76, "zero2": 79, "zero3": 40}
SPEED = {(FULL, 4): 113, ("zero2", 4): 100, ("zero3", 4): 100, (FULL, 8): 200, ("zero2", 8): 190, ("zero3", 8): 190}
WEIGHTS = {"single": 100, "ddp": 100, ("zero3", 2): 195, ("zero3", 4): 150}
SENT = {("ddp", 2): 8, ("ddp", 4): 24, ("zero2", 2): 8, ("zero2", 4): 24, ("zero3", 2): 12, ("zero3", 4): 36, "parameters": 1}
GRAD, PIPELINE = "fsdp1-shard-grad-op", "pp-gpipe"
# Studies 2 and 4, as printed.
SECONDS = {"single": 112.3, "ddp": 58.3, FULL: 58.8, GRAD: 58.6}
COMPUTE = {"single": 97.87, "ddp": 97.36, FULL: 96.98, GRAD: 97.71}
IDLE = {"single": 67.4, "ddp": 79.9, FULL: 117.2, GRAD: 72.6}
OVERLAP = {"ddp": 92.5, FULL: 95.14, GRAD: 98.06}
EXPOSED = {"ddp": 7.9, FULL: 4.6, GRAD: 1.7}
PASS_MS = {"ddp": 43.4, FULL: 50.1, GRAD: 106.8}
CALLS = {"ddp": 109, FULL: 73, GRAD: 37}
TRANSFERS = {"ddp": 0.398, FULL: 0.686, GRAD: 2.887} | {("collective_pass_count", name): count for name, count in CALLS.items()}
OVERHEAD = {"single": 80, "ddp": 105.3, FULL: 94.7, GRAD: 87.1}
SHARE = {(GRAD, 2): 1.25, (GRAD, 4): 2.5, (GRAD, 8): 4}
GIGABYTES = {"single": 12, "ddp": 12, FULL: 4, GRAD: 8}
TOKENS = {1: 16521, 4: 30819, 8: 32585, 16: 33900, 32: 34560}
ESTIMATE = {"peak_memory_bytes": 3076, "estimated_memory_bytes": 1899}
GPT2 = {"ddp": 370, "tp": 165, PIPELINE: 160}
LLM = {
    ("throughput_per_s", "fsdp2", 8): 148, ("throughput_per_s", "fsdp2", 4): 82, ("throughput_per_s", "tp"): 95,
    ("throughput_per_s", PIPELINE): 70, ("peak_memory_bytes", "fsdp2", 8): 14.6, ("peak_memory_bytes", "fsdp2", 4): 24.1,
    ("peak_memory_bytes", "tp"): 18.3, ("peak_memory_bytes", PIPELINE): 22.5,
}  # fmt: skip
COMMUNICATION = {("gpt2", "tp"): 55, ("gpt2", "ddp"): 10, ("llm-1.3b", "tp"): 35, ("llm-1.3b", "fsdp2"): 20}
BUBBLES = {  # by stages and micro-batches
    (4, 4): 42.9, (4, 8): 27.3, (4, 16): 15.8, (2, 8): 11.1, (8, 8): 46.7, (8, 32): 17.9, (2, 64): 1.5, (4, 64): 4.5,
    (8, 64): 9.9,
}  # fmt: skip
HELD = {("gpt2", "pp-1f1b"): 3, ("gpt2", PIPELINE): 5, ("llm-1.3b", "pp-1f1b"): 11, ("llm-1.3b", PIPELINE): 29}
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
    "p2-near-linear": (SECONDS, {"ddp": 112.3}, {FULL: 120}, {GRAD: 75}, {"single": 58}),
    "p2-order": (SECONDS, {"ddp": 58.7}, {GRAD: 59}, {FULL: 58.5}, dict.fromkeys(SECONDS, 58)),
    "p2-grad-nearly-baseline": (COMPUTE, {GRAD: 90}, {GRAD: 97.1}, {GRAD: 97.87}, {"single": 95}, {"single": 99.8, GRAD: 99.7}),
    "p2-efficiency-order": (COMPUTE, {GRAD: 98}, {"ddp": 97.8}, {FULL: 97.5}, dict.fromkeys(COMPUTE, 97)),
    "p2-idle-order": (IDLE, {FULL: 75}, {GRAD: 90}, {"ddp": 130}, dict.fromkeys(IDLE, 70)),
    "p2-overlap-order": (OVERLAP, {GRAD: 93}, {"ddp": 99}, {FULL: 99}, dict.fromkeys(OVERLAP, 95)),
    "p2-exposed-order": (EXPOSED, {GRAD: 9}, {"ddp": 1}, {FULL: 8}, dict.fromkeys(EXPOSED, 5)),
    "p2-raw-communication-order": (PASS_MS, {GRAD: 40}, {FULL: 43.4}, {"ddp": 60}, dict.fromkeys(PASS_MS, 50)),
    "p2-fewer-calls": (CALLS, {GRAD: 73}, {GRAD: 20}, {"ddp": 50}, {FULL: 109}, {GRAD: 109, "ddp": 37}),
    "p2-larger-transfers": (
        TRANSFERS, {GRAD: 0.5}, {"ddp": 3}, {FULL: 0.3}, {("collective_pass_count", GRAD): 80},
        {("collective_pass_count", "ddp"): 30}, dict.fromkeys(("ddp", FULL, GRAD), 1),
    ),
    "p2-overhead-order": (OVERHEAD, {GRAD: 100}, {"ddp": 90}, {FULL: 110}, dict.fromkeys(OVERHEAD, 80)),
    "p2-no-sync-4x": ({"every_pass": 4, "last_pass": 1}, *({"every_pass": sent} for sent in (1, 2, 8)), {"last_pass": 16}),
    "p2-overhead-sublinear": (SHARE, {(GRAD, 4): 2.6}, {(GRAD, 8): 5}, {(GRAD, 8): 10}, {(GRAD, 2): 0.5}),
    "p2-near-linear-to-8": (
        {(GRAD, 4): 3.7, (GRAD, 8): 7.2}, {(GRAD, 8): 4}, {(GRAD, 8): 1}, {(GRAD, 4): 1}, {(GRAD, 8): 6.5},
    ),
    "p2-full-3x-memory": (GIGABYTES, {FULL: 12}, {FULL: 8}, {FULL: 24}, {FULL: 2}),
    "p2-grad-1.5x-memory": (GIGABYTES, {GRAD: 12}, {GRAD: 24}, {GRAD: 4}),
    "p2-ddp-no-memory-savings": (GIGABYTES, {"ddp": 8}, {"ddp": 4}),
    "p2-batch-1-to-4": (TOKENS, {4: 16521}, {4: 9000}, {4: 60000}),
    "p2-batch-4-to-16": (TOKENS, {8: 30819}, {16: 32585}, {8: 40000}, {16: 30000}, {16: 40000}),
    "p2-batch-plateau": (TOKENS, {32: 40000}, {32: 20000}, {16: 32000}, {8: 30000}, {1: 31000}, dict.fromkeys(TOKENS, 9)),
    "p2-oom-at-64": ({64: "oom"}, {64: "completed"}, {64: "timeout"}),
    "p2-overhead-62": (ESTIMATE, {"peak_memory_bytes": 1899}, {"peak_memory_bytes": 1000}, {"peak_memory_bytes": 9000}),
    "p2-check-efficiency": (COMPUTE, {GRAD: 97}, {GRAD: 50}),
    "p2-check-overlap": (OVERLAP, {GRAD: 95}, {GRAD: 50}),
    "p2-check-idle": (IDLE, {GRAD: 100}, {GRAD: 900}),
    "p2-check-memory": ({GRAD: 10}, {GRAD: 51}, {GRAD: 100}),
    "p2-fsdp-scales-better": ({GRAD: 7.2, "ddp": 6.8}, {GRAD: 6.8}, {"ddp": 7.9}),
    "p4-ddp-efficiency": (
        {"resnet50": 87, "gpt2": 85}, {"resnet50": 70}, {"gpt2": 50}, {"resnet50": 100}, {"gpt2": 100}, {"gpt2": 12.5},
    ),
    "p4-ddp-efficiency-falls": ({2: 96, 4: 92, 8: 87}, {8: 92}, {4: 97}, {8: 99}, {2: 90}, dict.fromkeys((2, 4, 8), 90)),
    "p4-ddp-memory-constant": ({2: 5.8, 4: 5.8, 8: 5.8}, {8: 1.5}, {8: 12}, {4: 12}, {4: 2.9}, {2: 11.6}),
    "p4-small-models-scale-worse": ({"resnet50": 80, "gpt2": 85}, {"resnet50": 85}, {"resnet50": 90}),
    "p4-ddp-beats-tp-and-pp": (GPT2, {"ddp": 165}, {"tp": 400}, {PIPELINE: 400}, {"ddp": 1000}, {PIPELINE: 50}),
    "p4-tp-saves-memory": (
        {"ddp": 8.2, "tp": 5.1, PIPELINE: 5.4}, {"tp": 9}, {PIPELINE: 9}, {"ddp": 5}, {"tp": 8.2}, {PIPELINE: 8.2},
    ),
    "p4-tp-best-memory": ({"tp": 18, "fsdp2": 24, PIPELINE: 22}, {"tp": 30}, {"fsdp2": 10}, {PIPELINE: 10}, {"tp": 22}),
    "p4-tp-most-communication": (
        COMMUNICATION, {("gpt2", "tp"): 5}, {("llm-1.3b", "tp"): 20}, {("gpt2", "ddp"): 60}, {("llm-1.3b", "fsdp2"): 90},
    ),
    "p4-1.3b-oom": ({"ddp": "oom", "fsdp2": "completed"}, {"ddp": "completed"}, {"fsdp2": "oom"}),
    "p4-1.3b-checkpointing": ({"full": "completed"}, {"full": "oom"}),
    "p4-70b-tp-fsdp": ({"fsdp2": "oom", "tp-fsdp2": "completed"}, {"fsdp2": "completed"}, {"tp-fsdp2": "oom"}),
    "p4-7b-oom": ({"ddp": "oom"}, {"ddp": "completed"}),
    "p4-fsdp-best-at-1.3b": (
        LLM, *({name: 200 if name[0] == "throughput_per_s" else 10} for name in LLM if name[1:] != ("fsdp2", 8)),
        {("throughput_per_s", "fsdp2", 8): 82}, {("peak_memory_bytes", "fsdp2", 8): 18.3},
    ),
    "p4-tp-faster-than-fsdp-on-4": (
        {"tp": 95, "fsdp2": 82, PIPELINE: 70}, {"tp": 82}, {"fsdp2": 99}, {PIPELINE: 90}, {"fsdp2": 60}, {PIPELINE: 82},
    ),
    "p4-7b-tp-fsdp-best": (
        {"tp-fsdp2": 46, "tp-pp": 44, "fsdp2": 38}, {"tp-fsdp2": 44}, {"tp-pp": 50}, {"fsdp2": 45}, {"fsdp2": 90},
    ),
    "p4-pp-less-volume": ({PIPELINE: 1, "tp": 10}, {PIPELINE: 20}, {PIPELINE: 10}, {"tp": 0.5}),
    "p4-bubble-shrinks": (
        BUBBLES, {(4, 8): 50}, {(4, 16): 30}, {(2, 8): 30}, {(8, 8): 20}, {(4, 4): 1}, dict.fromkeys(BUBBLES, 20),
    ),
    "p4-bubble-rule": (
        BUBBLES, {(2, 8): 25}, {(4, 16): 20}, {(8, 32): 21}, {(2, 64): 15}, {(4, 64): 15.8}, {(8, 64): 19},
    ),
    "p4-1f1b-memory": (HELD, {("gpt2", "pp-1f1b"): 5}, {("llm-1.3b", "pp-1f1b"): 30}, {("gpt2", PIPELINE): 1}),
    "p4-zero-memory-falls": (
        {"zero1": 6.5, "zero2": 4.2, "zero3": 2}, {"zero2": 6.5}, {"zero3": 5}, {"zero1": 1}, {"zero2": 2},
    ),
    "p4-zero3-more-communication": (
        {"ddp": 100, "zero1": 100, "zero2": 95, "zero3": 150},
        {"zero1": 150}, {"zero2": 100}, {"zero2": 120}, {"zero3": 100}, {"zero3": 50}, {"ddp": 200}, {"zero1": 50},
    ),
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
        def look_up(**arguments):
            """The value of the longest key whose parts are all named; the name of a metric comes before all other names."""
            named = {metric, *arguments.values()}
            parts = {key: {*key} if isinstance(key, tuple) else {key} for key in values}
            return values[
                max((key for key in values if parts[key] <= named), key=lambda key: (metric in parts[key], len(parts[key])))
            ]

        return look_up

    return test.evaluate({}, {metric: value_of(metric) for metric in test.calls})


@pytest.mark.parametrize("claim_id", CASES)
def test_a_claim_holds_in_its_example_and_in_no_counterexample(claim_id):
    example, *counterexamples = CASES[claim_id]
    assert holds(claim_id, example)
    assert [changes for changes in counterexamples if holds(claim_id, example | changes)] == []


@pytest.mark.parametrize("number", [2, 4])
def test_each_claim_of_studies_2_and_4_has_counterexamples(number):
    assert {claim.id for claim in study(number).claims} <= CASES.keys()


@pytest.mark.parametrize(
    ("number", "count", "failing"),
    [
        (1, 1, []),
        (2, 25, []),
        (3, 19, ["p3-fsdp-2-3x-slower", "p3-async-up-to-28"]),
        (4, 6, ["p4-small-models-scale-worse"]),
        (5, 0, []),
    ],
)
def test_claims_have_the_verdicts_of_the_own_numbers_of_the_study(number, count, failing):
    """The claims of which the study prints all numbers hold on them, but for those that its notes contradict.

    count: of how many claims it prints all numbers. If a number is printed in several places, the last place counts."""
    cells = resolve_cells(matrix.load_matrix(matrix.find_matrix_file(f"paper{number}")))
    plain = [msgspec.to_builtins(cell) for cell in cells]

    def select(selector):
        return next((index for index, cell in enumerate(plain) if cell_names.matches_cell(cell, selector)), None)

    units, printed = {metric.name: metric.unit for metric in load_metrics()}, {}
    for entry in study(number).reported:
        parsed = printed_number.parse_number(entry.printed, entry.unit, units.get(entry.metric, ""), is_change=True)
        printed[entry.metric, entry.of, select(entry.cell)] = parsed
    verdicts = {}
    for claim in study(number).claims:
        test = Expression(claim.test)

        def value_of(metric):
            def look_up(of=None, **selector):
                parsed = printed[metric, of, select(selector)]
                return parsed.state if metric == "state" else parsed.value

            return look_up

        try:
            verdicts[claim.id] = test.evaluate({}, {metric: value_of(metric) for metric in test.calls})
        except KeyError:
            continue
    assert [claim_id for claim_id, verdict in verdicts.items() if not verdict] == failing
    assert len(verdicts) == count
