"""Predictions of memory and traffic use a rehearsal of the cell (a run without GPUs) if there is one, otherwise formulas."""

import json

import msgspec
import pytest
from support_planner import ADAMW, cell, make_question
from support_trust import make_own

from jobs.cli import main
from jobs.planner import advise, gpu, link, predict
from jobs.planner.machine import NO_GPU_MACHINE, PlannedMachine
from jobs.planning import rehearsals
from jobs.planning.rehearsals import Rehearsals
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.cluster.login_node import PYTHON_VARIABLE
from shardlab.files import files
from shardlab.matrix.cell import Cell
from shardlab.runs import rehearsed
from shardlab.runs.rehearsed import (
    MemoryByCategory,
    NotRehearsed,
    RehearsalRequest,
    Rehearsed,
    RehearsedCollective,
    RehearsedRank,
)
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

GIB = 1 << 30
NOTHING = dict.fromkeys(MemoryByCategory.__struct_fields__, 0)
STRATEGY = """\
from trainers.strategy import Strategy
VARIANTS = (Strategy(name="alone", summary="One process.", precisions=("fp32",), refuse=lambda cell: None,
                     engine="trainers.engines.single"),)
"""
MATRIX = """\
schema: 1
name: m
defaults: {workload: gpt2-tiny, launcher: fork, global_batch_size: 4, steps: 2}
include:
  - {strategy: alone, gpus: 1}
  - {strategy: fsdp2, gpus: 2, options: {offload: cpu}}
"""


def answer(one, parameter=10 * GIB, activation=0, collectives=(), **keys):
    """The result of a rehearsal of the cell `one`, whose ranks all need the same memory."""
    peak = MemoryByCategory(**{**NOTHING, "parameter": parameter, "activation": activation})
    rank = RehearsedRank(0, one.gpus, peak.total, peak, peak, tuple(collectives), 1e12)
    return Rehearsed(**{
        "schema": 1, "cell": one.hash(), "world_size": one.gpus, "ranks": (rank,), "how": "fake_tensors", "device": "cpu",
        "depths": None, "error_pct": 2.0, "error_from": "on nothing", "remarks": (), "seconds": 1.0, **keys,
    })  # fmt: skip


def machine(name="a100-80gb"):
    found = gpu.must_find_gpu_model(name)
    return PlannedMachine(True, name, found, gpu.find_gpu_memory(found, None), link.make_data_sheet_link(found), None, None)


def of(workspace, **options):
    return Rehearsals(Workspace(workspace), OwnPlugins(), Output(), **options)


def test_a_rehearsal_replaces_the_formula_for_memory_and_traffic():
    one = cell("gpt2-large", "fsdp2", 8, precision="bf16")
    calls = [RehearsedCollective("all_gather", 800, 8, 2.0), RehearsedCollective("all_reduce", 80, 2, 1.0)]
    calls.append(RehearsedCollective("all_to_all", 400, 4, 1.0))
    plain, found = (
        predict.predict_run(one, machine()),
        predict.predict_run(one, machine(), rehearsal=answer(one, collectives=calls)),
    )
    assert (plain.memory_from, plain.sent_from, found.memory_from, found.sent_from) == (*["formula"] * 2, *["rehearsal"] * 2)
    assert found.tensor_bytes.likely == 10 * GIB
    # The bounds are 10 GiB times two factors: the error of the rehearsal (2 % on each side), and the difference between the
    # operators of a GPU and of a CPU (-2 % to +6 %).
    assert found.tensor_bytes.low == pytest.approx(10 * GIB * 0.98 * 0.98)
    assert found.tensor_bytes.high == pytest.approx(10 * GIB * 1.06 * 1.02)
    assert {"cuda_context", "nccl_buffers", "fragmentation"} <= found.memory_by_category.keys()
    assert found.memory_bytes.likely > found.tensor_bytes.likely
    assert found.sent_bytes == 2 * 800 * 7 / 8 + 2 * 80 / 2 + 400 * 3 / 4
    assert found.collectives == tuple(calls)
    assert (found.step_s, found.formula_tensor_bytes) == (plain.step_s, plain.formula_tensor_bytes)
    assert "largest measured error 2 %, on nothing" in found.how


def test_a_rehearsal_on_a_cpu_has_no_terms_of_a_gpu():
    one = cell("gpt2-large", "fsdp2", 8)
    found = predict.predict_run(one, NO_GPU_MACHINE, rehearsal=answer(one, depths=(4, 6)))
    assert found.memory_by_category.keys() == {"parameter"}
    assert found.memory_bytes.high == pytest.approx(10 * GIB * 1.02)
    assert "extrapolated from 4 and 6 blocks" in found.how


def test_the_largest_micro_batch_agrees_with_the_rehearsal():
    """By the rehearsal, the cell needs twice the memory of the formula, so the largest micro-batch that fits is smaller."""
    one = cell("gpt2-large", "ddp", 8, micro=8, precision="bf16")
    plain = predict.predict_run(one, machine())
    twice = answer(one, parameter=0, activation=int(2 * plain.tensor_bytes.likely))
    found = predict.predict_run(one, machine(), rehearsal=twice)
    assert (found.fits, found.largest_micro_batch >= one.micro_batch_size) == ("yes", True)
    assert found.largest_micro_batch < plain.largest_micro_batch
    too_large = predict.predict_run(one, machine(), rehearsal=answer(one, activation=90 * GIB))
    assert (too_large.fits, too_large.largest_micro_batch < one.micro_batch_size) == ("no", True)


def test_a_cell_without_a_rehearsal_is_predicted_by_the_formula_with_a_reason():
    one = cell("gpt2-large", "fsdp2", 8)
    found = predict.predict_run(one, machine(), rehearsal=NotRehearsed(1, one.hash(), "It has no tensors.", 0.1))
    assert found.memory_bytes == predict.predict_run(one, machine()).memory_bytes
    assert found.memory_from == "formula"
    assert "not rehearsed: It has no tensors" in found.how


def test_advice_follows_rehearsals():
    """If the rehearsal of a cell shows that it does not fit, the cell is rehearsed again with the largest batch that fits."""
    asked = []

    def answers(cells):
        asked.append([one.micro_batch_size for one in cells if one.strategy == "fsdp2"])
        return {
            one.name(): answer(one, parameter=GIB, activation=10 * GIB * one.micro_batch_size)
            for one in cells
            if one.strategy == "fsdp2"
        }

    question = make_question("llm-1.3b", machine())
    report = advise.rank_strategies(question, get_answers=answers)
    (found,) = (one for one in report.ranked if one.cell.strategy == "fsdp2")
    assert asked[0] > [found.cell.micro_batch_size] == asked[1]
    assert (found.fits, found.predicted.memory_from) == (True, "rehearsal")
    assert (1 + 10 * found.cell.micro_batch_size) * GIB < 80e9
    assert found.cell.global_batch_size == question.global_batch
    assert found.cell.micro_batch_size * found.cell.gradient_accumulation_steps * 8 == question.global_batch
    assert {one.predicted.memory_from for one in report.ranked if one.cell.strategy != "fsdp2"} == {"formula"}


def test_a_stored_answer_is_used_and_a_damaged_one_is_not(tmp_path):
    one, own = cell("gpt2-tiny", "ddp", 2), tmp_path / ".shardlab" / "rehearsals"
    assert of(tmp_path).get_answers([one]) == {}
    file = own / f"{RehearsalRequest(one).compute_cache_key(full_depth=False)}.json"
    files.make_folder(own)
    file.write_bytes(msgspec.json.encode(answer(one)))
    assert of(tmp_path).get_answers([one]) == {one.name(): answer(one)}
    assert of(tmp_path, makes_missing=True).get_answers([one]) == {
        one.name(): answer(one)
    }  # the stored rehearsal is used, so no new one is made
    other = cell("gpt2-tiny", "ddp", 2, seed=7)
    assert list(of(tmp_path).get_answers([one, other])) == [one.name(), other.name()]
    file.write_bytes(file.read_bytes()[:-9])
    assert of(tmp_path).get_answers([one]) == {}


def test_a_rehearsal_whose_process_fails_has_a_reason(tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named torch >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(broken))
    cells = [cell("gpt2-tiny", "ddp", 2), cell("gpt2-tiny", "ddp", 2, optimizer=ADAMW, precision="bf16")]
    found = of(tmp_path, makes_missing=True).get_answers(cells)
    assert {one.why for one in found.values()} == {"the rehearsal failed: no module named torch"}
    (sentence,) = rehearsals.describe_refused_rehearsals(found)
    assert all(one.name() in sentence for one in cells)


def test_full_depth_needs_rehearse(capsys):
    assert main(["plan", "--matrix", "quickstart", "--full-depth"]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_a_plan_rehearses_own_strategies_and_stores_the_answers(tmp_path, capsys):
    """`jobs plan` rehearses a strategy of the workspace, which has no formula. A cell with offloading cannot be rehearsed."""
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "alone.py").write_text(STRATEGY)
    (tmp_path / "m.yaml").write_text(MATRIX)
    make_own(tmp_path)
    words = ["plan", "--matrix", str(tmp_path / "m.yaml"), "--workspace", str(tmp_path), "--json"]
    assert main([*words, "--rehearse"]) == 0
    printed = capsys.readouterr()
    own, offloading = (entry["predicted"] for entry in json.loads(printed.out)["cells"])
    assert (own["memory_from"], offloading["memory_from"]) == ("rehearsal", "formula")
    assert "not rehearsed, so predicted by formula: fsdp2-" in printed.err
    assert ": offload: " in printed.err
    (stored,) = (tmp_path / ".shardlab" / "rehearsals").iterdir()
    answered = rehearsed.decode_answer(stored.read_bytes())
    assert own["memory_bytes"]["likely"] == answered.worst_rank.peak_bytes > 1e6
    assert not list((tmp_path / "strategies").glob("__pycache__"))
    assert main(words) == 0
    again, _ = (entry["predicted"] for entry in json.loads(capsys.readouterr().out)["cells"])
    assert again == own


def test_jobs_advise_uses_stored_answers(tmp_path, capsys):
    words = ["advise", "--workload", "gpt2-large", "--gpus", "8", "--gpu", "a100-80gb", "--workspace", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["strategies"][0]
    one = msgspec.convert(first["cell"], type=Cell)
    own = tmp_path / ".shardlab" / "rehearsals"
    files.make_folder(own)
    stored = own / f"{RehearsalRequest(one).compute_cache_key(full_depth=True)}.json"
    stored.write_bytes(msgspec.json.encode(answer(one, parameter=3 * GIB)))
    assert main([*words, "--json"]) == 0
    again = {json.dumps(entry["cell"]): entry for entry in json.loads(capsys.readouterr().out)["strategies"]}
    assert again[json.dumps(first["cell"])]["predicted"]["tensor_bytes"]["likely"] == 3 * GIB
    assert main(words) == 0
    assert "predictions by formula and rehearsal" in capsys.readouterr().err
