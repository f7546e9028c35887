"""Strategies differ in how they train, not in what: the same losses from the same data, step by step."""

import pytest
from support_trainers import largest_difference, losses

pytest_plugins = ["support_trainers"]

DISTRIBUTED = ("ddp", "fsdp2", "fsdp2-zero2")
WORKLOADS = ("gpt2-tiny", "vit-tiny")


@pytest.fixture(scope="session")
def reference(bench):
    """The losses of one process, by workload and precision."""
    kept = {}

    def losses_of(workload, precision="fp32"):
        key = (workload, precision)
        if key not in kept:
            kept[key] = losses(bench.complete(workload=workload, precision=precision))
        return kept[key]

    return losses_of


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("strategy", DISTRIBUTED)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_ranks_do_the_work_of_one(bench, reference, strategy, workload, accumulation):
    run = bench.complete(strategy=strategy, workload=workload, gpus=2, accumulation=accumulation)
    assert largest_difference(losses(run), reference(workload)) < 1e-4
    assert len(losses(run)) == 10


@pytest.mark.parametrize("workload", WORKLOADS)
def test_accumulation_alone_changes_nothing(bench, reference, workload):
    run = bench.complete(workload=workload, accumulation=4)
    assert largest_difference(losses(run), reference(workload)) < 1e-4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_rank_is_enough_and_three_agree(bench, reference, strategy):
    alone = bench.complete(strategy=strategy, gpus=1)
    assert largest_difference(losses(alone), reference("gpt2-tiny")) < 1e-4
    batch = {"global_batch_size": 6}
    three, one = bench.complete(strategy=strategy, gpus=3, **batch), bench.complete(**batch)
    assert largest_difference(losses(three), losses(one)) < 1e-4


@pytest.mark.parametrize("strategy", ["single", *DISTRIBUTED])
def test_bf16_rounds_and_does_no_other_work(bench, reference, strategy):
    """bf16 keeps 8 bits of a number: one rounding is at most 2**-9 of it, which is 0.011 of the largest loss here (5.4).
    The errors of many products average out below that; 0.0027 was seen. Other data or another batch differ by 0.5 and more."""
    run = bench.complete(strategy=strategy, gpus=1 if strategy == "single" else 2, precision="bf16")
    difference = largest_difference(losses(run), reference("gpt2-tiny"))
    assert 1e-6 < difference < 0.011  # equal to fp32 would mean that nothing was computed in bf16
    effective = run.read_result().knobs["effective"]
    assert effective["output_dtype"] == "bfloat16"
    assert effective["weights_dtype"] == effective["optimizer_state_dtype"] == "float32"


def test_the_comparison_can_fail(bench, reference):
    other_data = losses(bench.complete(seed=43))
    assert largest_difference(other_data, reference("gpt2-tiny")) > 0.1
    half_batch = losses(bench.complete(global_batch_size=4))
    assert largest_difference(half_batch, reference("gpt2-tiny")) > 0.01


def test_torchrun_gives_what_forked_ranks_give(bench):
    keys = {"strategy": "ddp", "gpus": 2, "warmup_steps": 2}
    forked, launched = bench.complete(**keys), bench.run_dir(**keys)
    torchrun = (
        "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1", "-m", "trainers", "run",
    )  # fmt: skip
    code, errors = bench.finish(launched, *torchrun)
    assert code == 0, errors
    assert losses(launched) == losses(forked)
    ours, theirs = forked.read_result(), launched.read_result()
    assert ours.final_loss == theirs.final_loss
    assert (ours.rehearsal, theirs.rehearsal) == (True, False)
