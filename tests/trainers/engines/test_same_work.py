"""Strategies differ in how they train and not in what they compute: the same data gives the same losses, step by step."""

import pytest
from support_long import only_long

from trainers import menu

pytest_plugins = ["support_trainers"]
DISTRIBUTED = ("ddp", "fsdp2", "fsdp2-zero2")
WORKLOADS = ("gpt2-tiny", "vit-tiny")
# Strategies that declare `unprovable` or `other_work`, which other files test.
DECLARE = {"ddp-powersgd", "local-sgd", "ps-async", "ps-ssp"}
# How much losses may differ because sums are computed in a different order. The largest difference seen was 1e-6.
ROUNDING = 1e-4


def difference(one, other):
    """Returns the largest difference between the losses of two runs at the same step."""
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def smallest(bench, name):
    """Returns the keys of a small cell in which the strategy really divides its work. The cell has two ranks in each dimension
    of the strategy's mesh. If the strategy refuses this number of ranks, the cell has twice as many ranks, or else one rank.
    It has two micro-batches per step, and one parameter server if the strategy uses servers."""
    strategy = menu.find_strategy(name)
    mesh = {degree: 2 for degree in strategy.degrees if degree != "dp"}
    keys = {"strategy": name, "accumulation": 2, "servers": int(strategy.servers), **mesh}
    for gpus in (2 ** len(strategy.degrees), 2 * 2 ** len(strategy.degrees), 1):
        if menu.refuse(bench.run_dir(gpus=gpus, **keys).read_run().cell) is None:
            return {**keys, "gpus": gpus}
    raise AssertionError(f"{name} refuses its smallest cells")


def test_only_strategies_that_declare_other_work_are_left_out_of_the_comparison(bench):
    cells = {name: bench.run_dir(**smallest(bench, name)).read_run().cell for name in menu.load_strategies()}
    declare = {
        name
        for name, cell in cells.items()
        if menu.find_strategy(name).unprovable(cell) or menu.find_strategy(name).other_work(cell)
    }
    assert declare == DECLARE


@pytest.mark.parametrize("name", [name for name in menu.load_strategies() if name not in DECLARE])
def test_a_strategy_does_the_work_of_one_process_and_sends_what_theory_says(bench, name):
    """Tests each strategy on the menu with its default options. This test compares the losses of 10 steps with those of one
    process. The same-work proof of the run compares the weights before and after its steps, the gradient norms and the bytes of
    a step."""
    run_dir = bench.run_dir(prove="auto", **smallest(bench, name))
    cell = run_dir.read_run().cell
    code, errors = bench.finish(run_dir)
    assert code == 0, errors
    found = run_dir.read_result().same_work
    assert found.verdict == "proven", found.why
    assert found.communication_bytes["counted"] == pytest.approx(found.communication_bytes["theory"], rel=0.02)
    columns = [[record.loss for record in run_dir.steps(rank).records] for rank in range(cell.gpus)]
    ours = [sum(row) / cell.gpus for row in zip(*columns, strict=True)]
    assert difference(ours, bench.reference(workload="gpt2-tiny")) < ROUNDING


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_two_ranks_do_the_work_of_one_on_images(bench, strategy):
    assert (
        difference(bench.losses(strategy=strategy, workload="vit-tiny", gpus=2), bench.reference(workload="vit-tiny"))
        < ROUNDING
    )


@pytest.mark.parametrize("workload", WORKLOADS)
def test_accumulation_alone_changes_nothing(bench, workload):
    assert difference(bench.losses(workload=workload, accumulation=4), bench.reference(workload=workload)) < ROUNDING


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_rank_is_enough_and_three_agree(bench, strategy):
    assert difference(bench.losses(strategy=strategy, gpus=1), bench.reference(workload="gpt2-tiny")) < ROUNDING
    three, one = bench.losses(strategy=strategy, gpus=3, global_batch_size=6), bench.losses(global_batch_size=6)
    assert difference(three, one) < ROUNDING


@pytest.mark.parametrize("strategy", ["ddp", *only_long("single", "fsdp2", "fsdp2-zero2")])
def test_bf16_rounds_and_does_no_other_work(bench, strategy):
    """bf16 keeps 8 bits of a number, so two roundings change a number by at most 2**-8 of it, which is 0.022 for the largest
    loss here (5.4). The errors of many products average out to less: the largest difference seen was 0.0027. If a run trained
    on other data or with another batch, its losses would differ by 0.5 or more."""
    ours = bench.losses(strategy=strategy, gpus=1 if strategy == "single" else 2, precision="bf16")
    assert (
        1e-5 < difference(ours, bench.reference(workload="gpt2-tiny")) < 0.022
    )  # losses equal to those in fp32 would mean that nothing was computed in bf16


@pytest.mark.parametrize("change", [{"seed": 43}, {"global_batch_size": 4}])
def test_the_comparison_can_fail(bench, change):
    assert difference(bench.losses(**change), bench.reference(workload="gpt2-tiny")) > 0.1


def test_torchrun_gives_what_forked_ranks_give(bench):
    keys = {"strategy": "ddp", "gpus": 2, "warmup_steps": 2}
    forked, launched = bench.complete(**keys), bench.run_dir(**keys)
    torchrun = (
        "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1", "-m", "trainers", "run",
    )  # fmt: skip
    code, errors = bench.finish(launched, *torchrun, CUDA_VISIBLE_DEVICES="")
    assert code == 0, errors
    for rank in (0, 1):
        ours, theirs = forked.steps(rank).records, launched.steps(rank).records
        assert [(r.step, r.warmup, r.loss) for r in ours] == [(r.step, r.warmup, r.loss) for r in theirs]
    assert forked.read_result().final_loss == launched.read_result().final_loss
    # Both runs were planned for GPUs, but their ranks computed on the CPU.
    assert [(run.read_run().rehearsal, run.read_result().rehearsal) for run in (forked, launched)] == [(False, True)] * 2
