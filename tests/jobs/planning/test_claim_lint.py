"""`jobs plan` names claims whose test does not compare what the sentence names, and metrics without their instrument."""

import json

import pytest

from jobs.cli import main
from jobs.planning import claim_lint
from jobs.planning.resolve import resolve_cells
from shardlab.matrix import matrix

TEXT = """\
schema: 1
name: m
defaults: {workload: gpt2-tiny, launcher: fork, global_batch_size: 8, seq_len: 16, steps: 3, optimizer: {name: sgd, lr: 0.1}}
axes: {gpus: [2], strategy: [ddp, fsdp2, zero2, zero3]}
include: [{strategy: zero3, instruments: {memory: categories}}, {strategy: tp-fsdp2, gpus: 4, tp: 2}]
"""


def hints(path, text):
    path.write_text(TEXT + text)
    loaded = matrix.load_matrix(path)
    return claim_lint.lint_claims(loaded.file, resolve_cells(loaded))


@pytest.mark.parametrize(
    ("says", "test", "missing"),
    [
        ("ZeRO-2 and ZeRO-3 are slower than DDP.", "train_time_s(strategy='zero2') > train_time_s(strategy='ddp')", ["ZeRO-3"]),
        ("FSDP is slower than DeepSpeed.", "train_time_s(strategy='ddp') > 1", ["FSDP", "DeepSpeed"]),
        ("DeepSpeed is slower than FSDP.", "train_time_s(strategy='zero3') > train_time_s(strategy='fsdp2')", []),
        ("On a single node PP is slower than GPT-2.", "train_time_s(strategy='zero3') > 1", []),
        ("TP-2 with FSDP is slow.", "train_time_s(strategy='tp-fsdp2') > 1", []),
        ("It is slow on 4 GPUs.", "train_time_s(strategy='zero3') > 1", []),
    ],
)
def test_names_of_a_sentence_that_its_test_does_not_compare_are_hinted_at(tmp_path, says, test, missing):
    expected = [f"claim c: its sentence names {name}, and its test compares no cell of it." for name in missing]
    assert hints(tmp_path / "m.yaml", f'claims: [{{id: c, says: "{says}", where: w, test: "{test}"}}]\n') == expected


@pytest.mark.parametrize(
    ("says", "test", "words"),
    [
        ("It takes two to three times as long.", "{a} / {b} >= 2", "two to three times"),
        ("It takes 2-3x as long.", "{a} / {b} >= 2 and {c} / {b} <= 3", "2-3x"),
        ("The efficiency is 0.85 to 0.95.", "{a} < 95", "0.85 to 0.95"),
        ("It is between 5 and 9.", "{a} > 5", "between 5 and 9"),
        ("It is roughly 100 seconds longer.", "{a} - {b} >= 75", "roughly 100 seconds"),
        ("It uses almost twice as much.", "{a} > 1.6 * {b}", "almost twice"),
        ("It stays constant.", "{a} < 2 and {a} < {b} and {b} < {c}", "constant"),
        ("It takes two to three times as long.", "1.8 <= {a} / {b} <= 3.3", None),
        ("It takes 2-3x as long.", "{a} / {b} < 3 and {b} / {a} < 0.5", None),
        ("It is about 100 s longer.", "{a} - {b} > 75 and 125 > {a} - {b}", None),
        ("It is 4% to 28% faster.", "0.7 * {a} <= {b} < {a}", None),
        ("It equals the other.", "{a} == {b}", None),
        ("From 1 to 4 GPUs and from batch 16 to 32, up to 30% are gained.", "{a} < {b}", None),
    ],
)
def test_a_sentence_with_two_bounds_needs_a_test_with_two(tmp_path, says, test, words):
    calls = {name: f"train_time_s(strategy='{of}')" for name, of in (("a", "ddp"), ("b", "zero2"), ("c", "zero3"))}
    found = hints(tmp_path / "m.yaml", f'claims: [{{id: c, says: "{says}", where: w, test: "{test.format(**calls)}"}}]\n')
    ending = "and its test bounds no number from below and from above."
    assert found == ([] if words is None else [f"claim c: its sentence has two bounds ({words}), {ending}"])


def test_a_metric_without_its_instrument_is_hinted_at(tmp_path):
    text = """\
claims:
- {id: c, says: It is so., where: w, test: "memory_gradient_bytes(strategy='zero3') < memory_gradient_bytes(strategy='ddp')"}
reported:
- {where: table 1, metric: communication_pct, printed: 3 %, cell: {strategy: zero3}}
- {where: table 1, metric: train_time_s, printed: 3 s, cell: {strategy: zero3}}
"""
    of_ddp, of_zero3 = hints(tmp_path / "m.yaml", text)
    assert of_ddp.startswith("claim c: memory_gradient_bytes of ddp-")
    assert of_ddp.endswith(" needs `memory: categories` in its `instruments`.")
    assert of_zero3.startswith("reported 3 % (table 1): communication_pct of zero3-")
    assert of_zero3.endswith(" needs `profile` in its `instruments`.")


def test_a_plan_shows_the_hints(tmp_path, capsys):
    text = "claims: [{id: c, says: ZeRO-2 is slow., where: w, test: \"train_time_s(strategy='ddp') > 1\"}]\n"
    (tmp_path / "m.yaml").write_text(TEXT + text)
    hint = "claim c: its sentence names ZeRO-2, and its test compares no cell of it."
    assert main(["plan", "--matrix", str(tmp_path / "m.yaml"), "--workspace", str(tmp_path)]) == 0
    assert f"note: {hint}" in capsys.readouterr().err
    assert main(["plan", "--matrix", str(tmp_path / "m.yaml"), "--workspace", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["claim_hints"] == [hint]


@pytest.mark.parametrize(
    "name", ["paper1", "paper1-16-to-64-gpus", "paper2", "paper3", "paper3-communication", "paper3-faults", "paper4", "paper5"]
)
def test_shipped_matrices_have_no_hints(name):
    loaded = matrix.load_matrix(matrix.find_matrix_file(name))
    assert claim_lint.lint_claims(loaded.file, resolve_cells(loaded)) == []
