"""Model options (such as activation checkpointing and clipping) are applied correctly under each strategy, and a run records
which options took effect."""

import shutil
from functools import cache

import pytest
import torch
from support_long import LONG

from trainers import menu, model_options

pytest_plugins = ["support_trainers"]
STRATEGIES = [("single", 1), ("ddp", 2), ("fsdp2", 2)]
ROUNDING = 1e-4


def difference(one, other):
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@cache
def plain(bench, strategy, gpus):
    """Trains a run without any model option, once for each strategy and number of GPUs."""
    return bench.complete(strategy=strategy, gpus=gpus)


@pytest.mark.parametrize(("strategy", "gpus"), STRATEGIES)
@pytest.mark.parametrize(("which", "blocks"), [("full", 4), ("every-3", 2), ("segments-2", 1)])
def test_recomputing_activations_changes_no_loss(bench, strategy, gpus, which, blocks):
    run_dir = bench.complete(strategy=strategy, gpus=gpus, activation_checkpointing=which)
    assert run_dir.read_result().knobs["effective"]["checkpointed_blocks"] == blocks
    ours = [record.loss for record in run_dir.steps(0).records]
    assert difference(ours, [record.loss for record in plain(bench, strategy, gpus).steps(0).records]) < ROUNDING


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1-full-shard", "fsdp2", "zero3"])
def test_blocks_checkpointed_as_one_prove_the_same_work_and_the_same_bytes(bench, strategy):
    run_dir = bench.complete(strategy=strategy, gpus=2, activation_checkpointing="segments-3", prove="auto", steps=1)
    result = run_dir.read_result()
    assert result.same_work.verdict == "proven"
    assert result.knobs["effective"]["checkpointed_blocks"] == 2
    sent = result.communication_bytes
    assert abs(sent["counted"] / sent["theory"] - 1) < 0.02


def test_more_segments_than_blocks_are_refused(bench):
    run_dir = bench.run_dir(activation_checkpointing="segments-5")
    code, errors = bench.finish(run_dir)
    assert code == 1
    assert "found segments-5 for 4 blocks. Allowed: up to segments-4" in errors


@pytest.mark.parametrize(("strategy", "gpus"), STRATEGIES[1:])
def test_the_gradient_of_all_ranks_is_clipped_and_not_each_ranks_own(bench, strategy, gpus):
    reference = bench.reference(max_grad_norm=0.1)
    assert difference(bench.losses(strategy=strategy, gpus=gpus, max_grad_norm=0.1), reference) < ROUNDING
    # Without clipping the losses are different, which shows that clipping has an effect.
    assert difference(bench.reference(), reference) > 1e-2


def test_a_norm_above_the_gradients_changes_nothing(bench):
    assert difference(bench.losses(max_grad_norm=1e6), bench.reference()) == 0


@pytest.mark.parametrize(("keys", "blocks"), [({"compile": True}, 4), ({}, 0)])
def test_compile_compiles_each_block_and_the_effective_options_count_the_blocks(bench, monkeypatch, keys, blocks):
    """Only `make test-long` compiles blocks, because that takes half a minute. Here torch only marks them."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block: setattr(block, "_compiled_call_impl", block._call_impl))
    cell = bench.run_dir(**keys).read_run().cell
    task = menu.find_workload(cell.workload).build(cell, bench.data)
    model = model_options.checkpoint_and_compile(cell, task, task.model())
    assert model_options.count_changed_blocks(model) == {"checkpointed_blocks": 0, "compiled_blocks": blocks}


if LONG:

    @pytest.mark.parametrize(("precision", "allowed"), [("fp32", ROUNDING), ("bf16", 1e-2)])
    @pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++, which is not installed")
    def test_compiled_blocks_compute_the_same(bench, precision, allowed):
        """A run with compiled blocks has the same losses as a run without compilation, and its same-work proof succeeds."""
        # Compiling a block takes half a minute of CPU time, so the model has one block. The tolerance is larger in bf16,
        # because a compiled block rounds to bf16 less often.
        one_block = {"options": {"n_layer": 1}, "steps": 2, "precision": precision}
        run_dir = bench.complete(strategy="single", compile=True, prove="auto", **one_block)
        result = run_dir.read_result()
        assert result.knobs["effective"]["compiled_blocks"] == 1
        assert result.same_work.verdict == "proven", result.same_work.why
        ours = [record.loss for record in run_dir.steps(0).records]
        assert difference(ours, bench.losses(**one_block)) < allowed


def test_the_learning_rate_is_scaled_by_the_ranks(bench):
    from shardlab.matrix.cell import Optimizer, Schedule

    scaled = bench.losses(strategy="ddp", gpus=2, schedule=Schedule(lr_scaling="linear"))
    doubled = bench.losses(optimizer=Optimizer(name="sgd", lr=0.2, momentum=0.9))
    assert difference(scaled, doubled) < ROUNDING
