"""Instruments measure what is there, hold no step's time, and say what they cannot tell."""

import json

import pytest

from shardlab.cell import Instruments, Optimizer
from trainers import memory_estimate, menu

pytest_plugins = ["support_trainers"]
ADAM = Optimizer(name="adamw", lr=1e-3)
CUT = {"param_persistence_threshold": 0, "max_reuse_distance": 0}  # ZeRO-3 as textbooks have it


def categories(run_dir, rank=0):
    return json.loads(run_dir.memory_file(rank).read_text())


# (strategy, ranks, options, what the gradients on one rank really are cut by)
STRATEGIES = (
    ("single", 1, {}, 1), ("ddp", 2, {}, 1), ("fsdp2", 2, {}, 2), ("fsdp1-full-shard", 2, {}, 2), ("zero0", 2, {}, 1),
    ("zero1", 2, {}, 2), ("zero2", 2, {}, 2), ("zero3", 2, CUT, 1), ("fsdp2-hsdp", 4, {}, 2),
)  # fmt: skip


@pytest.mark.parametrize(("strategy", "gpus", "options", "gradients"), STRATEGIES)
def test_categories_agree_with_arithmetic(bench, strategy, gpus, options, gradients):
    """psi parameters in fp32: 4 psi, gradients 4 psi, Adam 8 psi, each cut over the ranks as the strategy has it."""
    look = Instruments(memory="categories")
    run_dir = bench.complete(strategy=strategy, gpus=gpus, options=options, optimizer=ADAM, steps=3, instruments=look)
    result = run_dir.read_result()
    found, psi = result.instruments["memory"], 4 * result.parameters
    expected = memory_estimate.of_cell(result.parameters, run_dir.read_run().cell, menu.strategy(strategy))
    assert found["estimate_bytes"] == expected
    start, most = categories(run_dir)["start"], found["largest_bytes"]
    assert start["parameter"] == pytest.approx(expected["parameter"], rel=0.02)
    assert start["optimizer_state"] == pytest.approx(expected["optimizer_state"], rel=0.02)
    assert most["gradient"] == pytest.approx(psi / gradients, rel=0.02)
