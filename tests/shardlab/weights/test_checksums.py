"""Checksums of weights: real ranks of a script write them, and the cells of a matrix are compared by them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import support_collect as support
import torch
from support_e2e import HANG_S

from collect import summary
from collect.reading.load import load_matrix
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.command import Command
from shardlab.weights import checksums
from shardlab.workspace.workspace import Workspace

SCRIPT = Path(__file__).parents[2] / "support" / "support_checksums.py"
ROOT = Path(__file__).parents[3]


def train(folder, *words):
    """The run folder of a script, with the checksums of its ranks."""
    folder.mkdir()
    search_path = os.pathsep.join((str(ROOT), str(SCRIPT.parent)))
    done = subprocess.run(
        [sys.executable, SCRIPT, folder, *words], env={**os.environ, "PYTHONPATH": search_path}, capture_output=True, text=True,
        check=False, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return train(tmp_path_factory.mktemp("reference") / "run", "single", "1")


def judge(path, *trained):
    """The verdicts about the cells of a matrix, in order. trained: (strategy, ranks, folder of a script)."""
    workspace = Workspace(path)
    cells = [
        AnyCell(workload="net", strategy=strategy, gpus=ranks, command=Command(words=["python", strategy]))
        for strategy, ranks, _ in trained
    ]
    support.keep(workspace, cells, repeats=1)
    for cell, (_, _, folder) in zip(cells, trained, strict=True):
        shutil.copytree(folder / "checksums", support.completed(workspace, cell).path / "checksums")
    rows = summary.summarize(load_matrix(workspace, None), "single").rows
    return [row.same_work for row in rows]


def change_record(folder, target, change, index=-1):
    """A copy of a script's folder in which a record of rank 0, the last by default, is changed."""
    shutil.copytree(folder, target)
    path = target / "checksums" / "rank-00000.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records[index])
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return target


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp1-flat", "fsdp1-no-shard", "fsdp2", "zero2", "zero3"])
def test_checksums_of_two_ranks_add_up_to_those_of_one_process(tmp_path, one_process, strategy):
    own, other = judge(tmp_path / "w", ("single", 1, one_process), (strategy, 2, train(tmp_path / "run", strategy, "2")))
    assert (own.verdict, other.verdict) == ("proven", "proven")
    assert 0 < other.parameter_difference < 1e-5
    assert "after step 3 of steps 0 to 3" in other.why
    gradients = "not seen" if strategy.startswith("zero") else "after step 3 differ by"
    assert f"gradients: {gradients}" in other.why or f"gradients {gradients}" in other.why


def test_gradients_of_a_wrong_scale_are_other_work_and_the_parameter_is_named(tmp_path, one_process):
    _, other = judge(tmp_path / "w", ("single", 1, one_process), ("ddp", 2, train(tmp_path / "run", "ddp", "2", "wrong")))
    assert other.verdict == "different"
    assert "most in head.weight" in other.why


def test_gradients_of_a_wrong_scale_that_adam_hides_are_other_work(tmp_path):
    reference = train(tmp_path / "reference", "single", "1", "adamw")
    _, other = judge(
        tmp_path / "w", ("single", 1, reference), ("ddp", 2, train(tmp_path / "run", "ddp", "2", "wrong", "adamw"))
    )
    assert other.parameter_difference < 1e-3
    assert (other.verdict, "gradients after step 3 differ by 1.0e+00" in other.why) == ("different", True)


def test_one_changed_weight_on_one_of_two_equal_ranks_is_named(tmp_path, one_process):
    def change(record):
        record["pieces"][1]["weight"] = [number + 1 for number in record["pieces"][1]["weight"]]

    ddp = train(tmp_path / "run", "ddp", "2")
    _, other = judge(tmp_path / "w", ("single", 1, one_process), ("ddp", 2, change_record(ddp, tmp_path / "changed", change)))
    assert (other.verdict, "most in embed.bias" in other.why) == ("different", True)


def test_weights_that_differ_before_the_first_step_are_other_work(tmp_path, one_process):
    def change(record):
        record["pieces"][0]["weight"][0] += 0.1

    folder = change_record(one_process, tmp_path / "changed", change, index=0)
    _, other = judge(tmp_path / "w", ("single", 1, one_process), ("ddp", 1, folder))
    assert (other.verdict, "after step 0 of steps 0 to 3" in other.why) == ("different", True)


def test_blocks_of_rows_and_of_columns_add_up_to_the_whole():
    whole = torch.randn(5, 7)
    sums = checksums._compute_projections(whole.flatten(), "name", (35,), (0,))
    rows = [checksums._compute_projections(whole[part], "name", (5, 7), (part.start, 0)) for part in (slice(0, 3), slice(3, 5))]
    columns = [
        checksums._compute_projections(whole[:, part], "name", (5, 7), (0, part.start)) for part in (slice(0, 4), slice(4, 7))
    ]
    torch.testing.assert_close(sum(rows), sums)
    torch.testing.assert_close(sum(columns), sums)
    assert not torch.allclose(checksums._compute_projections(whole.flatten(), "other", (35,), (0,)), sums)


def test_the_mean_square_of_a_checksum_is_the_square_of_the_norm():
    difference = torch.randn(4_000_000)  # more elements than are in memory at a time
    estimate = checksums._compute_projections(difference, "name", (4_000_000,), (0,)).square().mean()
    assert 0.2 < estimate / difference.square().sum() < 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda record: record.update(step=0), "after a later step are needed"),
        (lambda record: record.update(world_size=2), "are there for 1 of 2 ranks"),
        (lambda record: record["pieces"].pop(), "not all have the parameter head.bias"),
        (lambda record: record["pieces"][0].update(block=[5]), "of embed.weight, 5 of 231 elements are seen"),
        (lambda record: record.update(unseen={"embed.weight": "odd"}), "embed.weight is not seen, because 'odd'"),
    ],
)
def test_incomplete_checksums_prove_nothing_and_say_why(tmp_path, one_process, change, why):
    folder = change_record(one_process, tmp_path / "changed", change)
    _, other = judge(tmp_path / "w", ("single", 1, one_process), ("ddp", 1, folder))
    assert (other.verdict, why in other.why) == ("not proven", True), other.why


def test_weights_of_another_type_prove_nothing(tmp_path, one_process):
    def change(record):
        record["pieces"][0]["dtype"] = "bfloat16"

    folder = change_record(one_process, tmp_path / "changed", change, index=0)
    _, other = judge(tmp_path / "w", ("single", 1, one_process), ("ddp", 1, folder))
    assert (other.verdict, "embed.weight is bfloat16 here and float32 in one process" in other.why) == ("not proven", True)


def test_without_a_cell_of_one_process_nothing_is_proven(tmp_path):
    (alone,) = judge(tmp_path / "w", ("ddp", 2, train(tmp_path / "run", "ddp", "2")))
    assert (alone.verdict, "no cell of one process" in alone.why) == ("not proven", True)


def test_a_step_after_a_checksum_does_not_count_for_times(one_process):
    records = [json.loads(line) for line in (one_process / "steps" / "rank-00000.jsonl").read_text().splitlines()]
    assert [record.get("watched", False) for record in records] == [True, False, False]


def test_outside_of_a_run_nothing_is_imported_and_nothing_is_written(tmp_path):
    code = "import sys; from shardlab import steps; steps.report(step=1, loss=2.0); steps.checksum(None); print(*sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDLAB_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True,
        text=True, check=True, timeout=HANG_S,
    )  # fmt: skip
    assert not {"torch", "numpy", "msgspec"} & set(done.stdout.split())
    assert list(tmp_path.iterdir()) == []
