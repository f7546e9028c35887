"""The options of DDP, FSDP1, the hybrid forms of FSDP2, and DeepSpeed's ZeRO do the work of one process and send the bytes that
theory says."""

import msgspec
import pytest
from support_long import only_long
from torch.utils import cpp_extension

from trainers import menu
from trainers.theory.term import ModelPart

pytest_plugins = ["support_trainers"]
# How much losses may differ because sums are computed in a different order. The largest difference seen was 2e-6.
ROUNDING = 1e-4
# With these options, DeepSpeed's ZeRO-3 shards every parameter and frees it after use, as textbooks describe it.
FREED = {"param_persistence_threshold": 0, "max_reuse_distance": 0, "max_live_parameters": 0}
# Here options are tested; tests/trainers/engines/test_same_work.py tests every strategy with its default options.
OPTIONS = (
    ("ddp", {"static_graph": True, "gradient_as_bucket_view": True}),
    ("fsdp1-full-shard", {"wrap": "none"}),
    ("fsdp1-full-shard", {"backward_prefetch": "none", "forward_prefetch": True, "limit_all_gathers": False}),
    ("fsdp2", {"prefetch": 2, "offload": "cpu"}),
    (
        "zero2",
        {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000, "overlap_comm": True, "offload_optimizer": "cpu"},
    ),
    ("zero3", {"offload_optimizer": "cpu", "offload_param": "cpu", "prefetch_bucket_size": 0, "overlap_comm": False}),
)


def difference(one, other):
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def proven(run_dir):
    """Checks that the same-work proof of a run succeeded. Returns (bytes of one step as counted, bytes of one step by
    theory)."""
    found = run_dir.read_result().same_work
    assert found.verdict == "proven", found.why
    counted, theory = found.communication_bytes["counted"], found.communication_bytes["theory"]
    assert counted == pytest.approx(theory, rel=0.02)
    return counted, theory


def losses(run_dir):
    """Returns the loss of each step of a run, as the mean over its ranks."""
    ranks = run_dir.read_run().world.world_size
    columns = [[record.loss for record in run_dir.steps(rank).records] for rank in range(ranks)]
    return [sum(row) / ranks for row in zip(*columns, strict=True)]


def test_zero3_without_kept_parameters_does_the_work_of_one_process(bench):
    run_dir = bench.complete(strategy="zero3", gpus=4, options=FREED, accumulation=2, prove="auto")
    assert difference(losses(run_dir), bench.reference()) < ROUNDING
    assert proven(run_dir)[0] > 0


@pytest.mark.parametrize(("strategy", "gpus"), [("zero2", 2), ("zero3", 2), ("fsdp1-full-shard", 2), ("fsdp2-hsdp", 4)])
def test_sharded_image_training_with_accumulation_and_clipping_does_the_same_work(bench, strategy, gpus):
    """Sharded training of an image model with accumulation, activation checkpointing and clipping equals one process."""
    clipped = {"workload": "vit-tiny", "max_grad_norm": 0.5}
    ours = bench.losses(strategy=strategy, gpus=gpus, accumulation=2, activation_checkpointing="full", **clipped)
    assert difference(ours, bench.reference(**clipped)) < ROUNDING
    assert difference(ours, bench.reference(workload="vit-tiny")) > 10 * ROUNDING  # shows that clipping has an effect


@pytest.mark.parametrize(("strategy", "options"), OPTIONS)
def test_options_change_how_and_not_what(bench, strategy, options):
    """With each option, the losses stay those of one process and the proof succeeds."""
    run_dir = bench.complete(strategy=strategy, gpus=2, options=options, prove="auto")
    assert difference(losses(run_dir), bench.reference()) < ROUNDING
    proven(run_dir)


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys", "sync"),
    [
        ("fsdp1-full-shard", 2, {"accumulation": 4}, "every_pass"),
        ("fsdp2-hsdp", 4, {"accumulation": 2}, "shard_every_pass"),
        ("tp-fsdp2", 4, {"accumulation": 2, "tp": 2}, "every_pass"),
        *only_long(
            ("fsdp1-no-shard", 2, {"accumulation": 2}, "every_pass"),
            ("fsdp1-shard-grad-op", 2, {"accumulation": 4}, "every_pass"),
            ("fsdp1-hybrid-shard", 4, {"accumulation": 2}, "every_pass"),
            ("fsdp1-hybrid-shard-zero2", 4, {"accumulation": 2}, "every_pass"),
            ("fsdp2", 2, {"accumulation": 4}, "every_pass"),
            ("fsdp2-zero2", 2, {"accumulation": 2}, "every_pass"),
            ("fsdp2-hsdp", 4, {"accumulation": 2}, "every_pass"),
            ("fsdp2-hsdp-zero2", 4, {"accumulation": 2}, "shard_every_pass"),
        ),
    ],
)
def test_gradients_that_each_pass_reduces_are_those_of_one_process(bench, strategy, gpus, keys, sync):
    """tests/support/support_sent_bytes.py has the bytes of these cells, worked out by hand, for 1, 2 and 4 passes."""
    run_dir = bench.complete(strategy=strategy, gpus=gpus, options={"sync": sync}, prove="auto", **keys)
    assert difference(losses(run_dir), bench.reference()) < ROUNDING
    every_pass = proven(run_dir)[0]
    assert run_dir.read_result().knobs["effective"]["sync"] == sync
    last_pass = bench.complete(strategy=strategy, gpus=gpus, prove="auto", steps=1, **keys)
    assert every_pass > 1.05 * proven(last_pass)[0]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        # test_precision.py tests the strategies with their default options.
        ("zero2", {"communication_dtype": "bf16"}),
        ("ddp", {"comm_hook": "bf16"}),
        *only_long(("zero0", {}), ("zero1", {}), ("zero3", {}), ("fsdp1-full-shard", {}), ("fsdp2", {"prefetch": 1})),
    ],
)
def test_bf16_rounds_and_does_no_other_work(bench, strategy, options):
    """Two roundings of bf16 change a number by at most 2**-8 of it, which is 0.022 for the largest loss here (5.5). Other data
    would change losses by 0.5 or more. The runs have only five steps, because rounding errors grow from step to step."""
    ours = bench.losses(strategy=strategy, gpus=2, precision="bf16", options=options, steps=5)
    assert 1e-5 < difference(ours, bench.reference()[:5]) < 0.022


def test_a_block_that_is_computed_again_is_gathered_again(bench):
    """With activation checkpointing, ZeRO-3 sends more bytes, because it gathers each block once more."""
    keys = {"strategy": "zero3", "gpus": 2, "options": FREED, "prove": "auto", "steps": 1}
    plain, again = (proven(bench.complete(activation_checkpointing=which, **keys)) for which in ("none", "full"))
    assert again[0] > 1.1 * plain[0]


def test_zero_plus_plus_gathers_backward_weights_from_the_near_group(bench):
    """With hpz_partition_size 2, ZeRO++ gathers for backward from 2 ranks and not from 4, so it sends fewer bytes."""
    keys = {"strategy": "zero3", "gpus": 4, "prove": "auto", "steps": 1, "activation_checkpointing": "full", "accumulation": 2}
    far, near = (bench.complete(options={**FREED, "hpz_partition_size": size}, **keys) for size in (1, 2))
    assert near.read_result().knobs["effective"]["hpz_partition_size"] == 2
    assert proven(near)[0] < 0.85 * proven(far)[0]


def test_powersgd_sends_little_and_says_that_it_does_other_work(bench):
    result = bench.complete(strategy="ddp-powersgd", gpus=2, prove="auto").read_result()
    assert (result.same_work.verdict, result.knobs["effective"]["comm_hook"]) == ("other work", "powerSGD_hook")
    sent = result.communication_bytes
    assert "counted" not in sent  # callbacks start the collectives of PowerSGD, and the proof cannot count them there
    assert sent["theory"] < 0.15 * sent["textbook"]
    ours = bench.losses(strategy="ddp-powersgd", gpus=2)
    assert 1e-3 < difference(ours, bench.reference()) < 1.0  # the loss falls, but differs from the reference


def test_effective_options_are_read_from_deepspeed(bench):
    options = {"reduce_bucket_size": 30_000, "communication_dtype": "bf16", "param_persistence_threshold": 5_000}
    run_dir = bench.complete(strategy="zero3", gpus=2, precision="bf16", max_grad_norm=3.0, options=options, steps=2)
    found = run_dir.read_result().knobs["effective"]
    expected = {
        "zero_stage": 3, "reduce_bucket_size": 30_000, "overlap_comm": True, "max_grad_norm": 3.0, "weights_dtype": "bfloat16",
        "optimizer_state_dtype": "float32", "gradients_reduced_as": "bfloat16", "gradients_added_up_as": "float32",
        "optimizer": "SGD", "offload_optimizer": "none",
    }  # fmt: skip
    assert expected.items() <= found.items()
    # Parameters that DeepSpeed does not shard, because they have at most 5,000 elements: in gpt2-tiny, the table of positions,
    # the output projections of attention (64 x 64), and every vector.
    small = 5 * 64 * 64 + 4 * (2 * 128 + 192 + 64 + 256 + 64) + 128
    assert found["uncut_parameters"] == small


def test_effective_options_are_read_from_fsdp(bench):
    options = {"wrap": "none", "backward_prefetch": "post", "limit_all_gathers": False}
    one = bench.complete(strategy="fsdp1-hybrid-shard", gpus=4, precision="bf16", options=options, steps=2)
    expected = {
        "sharding": "HYBRID_SHARD", "units": 1, "ranks_of_a_shard_group": 2, "backward_prefetch": "BACKWARD_POST",
        "limit_all_gathers": False, "parameters_gathered_as": "bfloat16", "gradients_reduced_as": "float32",
    }  # fmt: skip
    assert expected.items() <= one.read_result().knobs["effective"].items()
    two = bench.complete(strategy="fsdp2-hsdp", gpus=4, options={"prefetch": 2}, steps=2)
    assert {"mesh": [2, 2], "prefetch": 2}.items() <= two.read_result().knobs["effective"].items()


@pytest.mark.parametrize(
    ("strategy", "change", "options", "words"),
    [
        ("zero3", {"launcher": "fork"}, {"offload_param": "nvme", "nvme_path": "/tmp"}, "fork runs ranks on the CPU"),
        ("zero3", {}, {"offload_optimizer": "nvme"}, "nvme_path: found null. Allowed: an absolute path"),
        ("zero3", {}, {"nvme_path": "/tmp"}, "nothing is offloaded to nvme"),
        ("zero3", {}, {"max_reuse_distance": -1}, "found -1"),
        ("zero3", {}, {"hpz_partition_size": 3}, "found 3 on 4 ranks"),
        ("zero3", {}, {"hpz_partition_size": 0}, "hpz_partition_size: found 0. Allowed: a whole number from 1."),
        ("zero3", {"launcher": "fork"}, {"quantized_weights": True}, "fork runs ranks on the CPU"),
        ("zero3", {}, {"quantized_gradients": True}, "found nnodes: 1"),
        ("zero2", {}, {"reduce_bucket_size": "all"}, "reduce_bucket_size: found all. Allowed: a whole number from 1, or null."),
        ("zero2", {}, {"communication_dtype": "bf16"}, "bf16 with precision fp32"),
        ("zero1", {"precision": "bf16"}, {"overlap_comm": True}, "BF16_Optimizer"),
        ("fsdp1-no-shard", {"precision": "bf16", "gradient_accumulation_steps": 2}, {}, "and fails"),
        ("fsdp1-hybrid-shard", {"gpus": 2}, {}, "found 2 on 2 ranks"),
        (
            "fsdp1-full-shard",
            {"gradient_accumulation_steps": 2},
            {"offload": "cpu", "sync": "every_pass"},
            "sync: found every_pass with offload: cpu and several passes per step, where FSDP1 replaces the gradient",
        ),
        ("fsdp1-hybrid-shard", {}, {"sync": "shard_every_pass"}, "sync: found shard_every_pass. Allowed: last_pass, every"),
        ("fsdp2", {}, {"sync": "shard_every_pass"}, "sync: found shard_every_pass. Allowed: last_pass, every_pass."),
        ("pp-fsdp2", {"pp": 2, "dp": 2}, {"sync": "every_pass"}, "torch's pipelines reduce gradients after the last pass."),
        ("tp-pp-fsdp2", {"tp": 2, "pp": 2, "dp": 1}, {"sync": "every_pass"}, "torch's pipelines reduce"),
        ("fsdp2-hsdp", {"gpus": 6}, {"replicas": 4}, "found 4 on 6 ranks"),
        ("fsdp2", {"max_grad_norm": 1.0}, {"offload": "cpu"}, "in CPU memory"),
        ("fsdp2", {}, {"prefetch": -1}, "found -1"),
        ("ddp", {"gradient_accumulation_steps": 2}, {"static_graph": True}, "first pass"),
        ("ddp", {}, {"comm_hook": "bf16"}, "bf16 with precision fp32"),
    ],
)  # fmt: skip
def test_an_impossible_option_of_sharding_is_refused_before_a_rank_starts(bench, strategy, change, options, words):
    cell = bench.run_dir(strategy=strategy, gpus=4, options=options).read_run().cell
    why = menu.refuse(msgspec.structs.replace(cell, **{"launcher": "torchrun", **change}))
    assert why is not None
    assert words in why


def test_sync_has_no_effect_in_one_pass_and_is_allowed_there(bench):
    for strategy, options in (("fsdp1-full-shard", {"offload": "cpu"}), ("fsdp2", {}), ("tp-fsdp2", {})):
        cell = bench.run_dir(strategy=strategy, gpus=4, tp=2 if "tp" in strategy else 1, options=options).read_run().cell
        changed = msgspec.structs.replace(cell, launcher="torchrun", options={**cell.options, "sync": "every_pass"})
        assert menu.refuse(changed) is None
        sizes = ModelPart(elements=1000, block_elements=800, blocks=4, hidden_elements=64, reductions=(2, 2))
        terms = [menu.find_strategy(strategy).theory_of_communication(one, sizes) for one in (cell, changed)]
        divisions = [menu.find_strategy(strategy).theory_of_memory(one, 1000) for one in (cell, changed)]
        assert terms[0] == terms[1]
        assert divisions[0] == divisions[1]


def test_integers_of_zero_plus_plus_need_a_gpu_and_are_not_provable(bench):
    run_dir = bench.run_dir(strategy="zero3", gpus=2, options={"quantized_weights": True}, launcher="torchrun", prove="auto")
    cell = run_dir.read_run().cell
    assert menu.find_strategy("zero3").refuse(cell) is None
    assert "quantized_weights: ZeRO++ rounds" in menu.find_strategy("zero3").unprovable(cell)
    exact = msgspec.structs.replace(cell, options={**cell.options, "quantized_weights": False, "hpz_partition_size": 2})
    assert menu.find_strategy("zero3").unprovable(exact) is None
    code, errors = bench.finish(run_dir)
    assert code == 1
    assert "quantized_weights: DeepSpeed's quantiser needs a GPU, and this rank has none. Allowed: false." in errors


def test_the_quantiser_of_zero_plus_plus_needs_the_compiler_of_cuda(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # DeepSpeed reads this variable when it is imported, which is in the next line
    from trainers.deepspeed_zero import engine

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert not engine.has_quantiser()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    assert not engine.has_quantiser()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert engine.has_quantiser()


@pytest.mark.parametrize("strategy", ["zero3", *only_long("fsdp1-full-shard")])
def test_torchrun_gives_what_forked_ranks_give(bench, strategy):
    keys = {"strategy": strategy, "gpus": 2, "steps": 3}
    forked, launched = bench.complete(**keys), bench.run_dir(**keys)
    code, errors = bench.finish(
        launched, "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", "trainers", "run",
    )  # fmt: skip
    assert code == 0, errors
    assert [r.loss for r in forked.steps(1).records] == [r.loss for r in launched.steps(1).records]
