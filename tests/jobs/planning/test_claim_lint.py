"""`jobs plan` names claims whose test does not compare what the sentence names, and metrics without their instrument."""

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
    assert main(["plan", "--matrix", str(tmp_path / "m.yaml"), "--workspace", str(tmp_path)]) == 0
    assert "note: claim c: its sentence names ZeRO-2, and its test compares no cell of it." in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["paper1", "paper1-16-to-64-gpus", "paper3", "paper3-communication", "paper3-faults", "paper5"]
)
def test_shipped_matrices_have_no_hints(name):
    loaded = matrix.load_matrix(matrix.find_matrix_file(name))
    assert claim_lint.lint_claims(loaded.file, resolve_cells(loaded)) == []
