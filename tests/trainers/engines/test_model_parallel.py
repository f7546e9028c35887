"""Tensor parallelism, pipeline parallelism and their combinations in a mesh do the work of one process, and send the bytes that
theory says."""

import msgspec
import pytest
from support_long import only_in_long_form, only_long

from trainers import menu

pytest_plugins = ["support_trainers"]
# How much losses may differ because sums are computed in a different order. The largest difference seen was 2e-6; it was 7e-5
# with an error in which layer norms ignored some positions.
ROUNDING = 2e-5
SLICES = {"sequence_parallel": True}
TORCHRUN = (
    "torch.distributed.run",
    "--nnodes=1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
    "--local-addr=127.0.0.1",
)


def difference(one, other):
    """Returns the largest difference between the losses of two runs at the same step."""
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def losses_of(run_dir):
    """Returns the loss of each timed step: the mean over all ranks, where each rank has recorded the loss of the pipeline to
    which it belongs."""
    ranks = run_dir.read_run().world.world_size
    columns = [[r.loss for r in run_dir.steps(rank).records if not r.warmup] for rank in range(ranks)]
    return [sum(row) / ranks for row in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys"),
    [
        # Here options and combinations are tested; tests/trainers/engines/test_same_work.py tests every strategy with its
        # default options.
        ("tp", 4, {"options": SLICES, "accumulation": 2, "activation_checkpointing": "every-2"}),
        # The vocabulary's 257 rows are divided into 129 and 128; of 1,024 rows, the last ranks have only padding.
        ("tp-fsdp2", 4, {"tp": 2, "options": {"pad_vocabulary": 257}}),
        ("tp-pp", 4, {"tp": 2, "pp": 2, "accumulation": 2, "options": {"pad_vocabulary": 1024}}),
        ("pp-1f1b", 3, {"accumulation": 4}),  # the model has 4 blocks, so one of the three stages has two blocks
        ("pp-1f1b", 2, {"accumulation": 2, "workload": "vit-tiny", "activation_checkpointing": "full"}),
        ("tp", 2, {"workload": "llm-1.3b-tiny", "options": SLICES, "accumulation": 2, "activation_checkpointing": "full"}),
        ("pp-1f1b", 2, {"workload": "llm-1.3b-tiny", "accumulation": 2, "activation_checkpointing": "full"}),
        *only_long(
            ("tp", 2, {"options": SLICES}),
            ("tp-fsdp2", 4, {"tp": 2, "options": SLICES}),
            ("pp-interleaved", 2, {"accumulation": 4}),
            ("pp-gpipe", 3, {"accumulation": 2, "workload": "vit-tiny"}),
            ("pp-interleaved", 2, {"accumulation": 2, "workload": "vit-tiny"}),
            ("tp-fsdp2", 4, {"tp": 2, "workload": "vit-tiny", "activation_checkpointing": "full"}),
            ("pp-1f1b", 1, {}),  # the two layers that share the tied weight are on one rank
            ("tp", 4, {"accumulation": 2}),
            ("tp", 2, {"workload": "vit-tiny", "accumulation": 2}),
            ("pp-1f1b", 4, {"accumulation": 4}),
            ("pp-fsdp2", 4, {"pp": 2, "accumulation": 4, "workload": "vit-tiny"}),
            ("tp", 2, {"workload": "llm-1.3b-tiny", "accumulation": 2, "activation_checkpointing": "every-2"}),
            ("tp-fsdp2", 4, {"workload": "llm-1.3b-tiny", "tp": 2, "options": SLICES}),
            ("tp-pp-fsdp2", 8, {"workload": "llm-1.3b-tiny", "tp": 2, "pp": 2, "accumulation": 2}),
        ),
    ],
)
def test_model_parallel_strategies_do_the_work_of_one_process_and_send_theorys_bytes(bench, strategy, gpus, keys):
    """This test compares the losses of 10 steps with those of one process. The same-work proof of the run compares the weights
    by name, before and after its steps, the gradient norms, and the bytes of a step."""
    degrees = menu.find_strategy(strategy).degrees
    keys = {**({degrees[0]: gpus} if len(degrees) == 1 else {}), **keys}
    run_dir = bench.complete(strategy=strategy, gpus=gpus, prove="auto", **keys)
    padding = {name: value for name, value in keys.get("options", {}).items() if name == "pad_vocabulary"}
    reference = bench.reference(workload=keys.get("workload", "gpt2-tiny"), **({"options": padding} if padding else {}))
    assert difference(losses_of(run_dir), reference) < ROUNDING
    proof = run_dir.read_result().same_work
    assert proof.verdict == "proven", proof.why
    sent = proof.communication_bytes
    assert sent["counted"] == pytest.approx(sent["theory"], rel=0.02)
    assert (sent["counted"] > 0) == (gpus > 1)


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys"),
    [
        # test_precision.py tests `tp` and `pp-1f1b`.
        ("pp-fsdp2", 4, {"pp": 2, "accumulation": 2}),
        ("tp-fsdp2", 4, {"workload": "llm-1.3b-tiny", "tp": 2, "options": SLICES}),
        *only_long(
            ("tp", 2, {"tp": 2}),
            ("pp-1f1b", 2, {"pp": 2, "accumulation": 2}),
            ("tp-fsdp2", 4, {"tp": 2}),
            ("tp", 2, {"workload": "llm-1.3b-tiny", "tp": 2}),
            ("pp-fsdp2", 4, {"workload": "llm-1.3b-tiny", "pp": 2, "accumulation": 2}),
        ),
    ],
)
def test_bf16_rounds_and_does_no_other_work(bench, strategy, gpus, keys):
    """test_same_work.py explains the tolerance: two roundings of bf16 change a number by at most 2**-8 of it, which is
    0.022 for the largest loss. The largest difference seen was 0.0051. Numbers that are sent in bf16 count as 2 bytes each."""
    run_dir = bench.complete(strategy=strategy, gpus=gpus, precision="bf16", prove="auto", **keys)
    workload = keys.get("workload", "gpt2-tiny")
    assert (
        1e-5 < difference(losses_of(run_dir), bench.reference(workload=workload)) < 0.022
    )  # equal losses would mean that nothing was computed in bf16
    result = run_dir.read_result()
    assert result.same_work.verdict == "proven", result.same_work.why
    assert result.communication_bytes["counted"] == pytest.approx(result.communication_bytes["theory"], rel=0.02)
    assert result.knobs["effective"]["output_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys"),
    [
        ("pp-1f1b", 4, {"pp": 4, "accumulation": 4}),
        ("tp-fsdp2", 4, {"tp": 2}),
        ("tp-pp", 4, {"tp": 2, "pp": 2, "accumulation": 2}),
        ("pp-fsdp2", 4, {"pp": 2, "accumulation": 2}),
        *only_long(("tp", 2, {"tp": 2})),
    ],
)
def test_gradients_are_clipped_by_the_norm_of_the_complete_model(bench, strategy, gpus, keys):
    """The norm of the gradients is above 0.5 in the first steps, so they are scaled. A norm over the part of one rank, or a
    norm that counts the tied weight twice, would scale them differently."""
    ours = bench.losses(strategy=strategy, gpus=gpus, max_grad_norm=0.5, **keys)
    clipped = bench.reference(workload="gpt2-tiny", max_grad_norm=0.5)
    assert difference(ours, clipped) < ROUNDING
    assert difference(clipped, bench.reference(workload="gpt2-tiny")) > 0.1


def test_the_effective_options_are_read_from_the_running_model(bench):
    """The key `effective` of the result has the mesh, the schedule and the shards that the run really used."""
    run_dir = bench.complete(
        strategy="tp-pp-fsdp2", gpus=4, tp=2, pp=2, accumulation=2, activation_checkpointing="every-2", steps=1
    )
    result = run_dir.read_result()
    found = {key: value for key, value in result.knobs["effective"].items() if key in (
        "mesh", "schedule", "stages", "microbatches", "split_layers", "sharded_groups", "checkpointed_blocks",
        "reshard_after_forward", "output_dtype",
    )}  # fmt: skip
    assert found == {
        "mesh": {"pp": 2, "dp": 1, "tp": 2}, "schedule": "Schedule1F1B", "stages": 2, "microbatches": 2,
        "split_layers": 8, "sharded_groups": 3, "checkpointed_blocks": 2, "reshard_after_forward": False,
        "output_dtype": "float32",
    }  # fmt: skip
    assert result.parameters == menu.find_workload("gpt2-tiny").parameters


@only_in_long_form
@pytest.mark.parametrize(
    ("strategy", "gpus", "keys"),
    [
        ("pp-1f1b", 2, {"pp": 2, "accumulation": 2}),
        ("tp", 2, {"tp": 2}),
        ("tp-pp", 4, {"tp": 2, "pp": 2, "accumulation": 2}),
    ],
)
def test_torchrun_gives_what_forked_ranks_give(bench, strategy, gpus, keys):
    keys = {"strategy": strategy, "gpus": gpus, "steps": 3, **keys}
    forked, launched = bench.complete(**keys), bench.run_dir(**keys)
    code, errors = bench.finish(launched, *TORCHRUN, f"--nproc-per-node={gpus}", "-m", "trainers", "run")
    assert code == 0, errors
    assert losses_of(forked) == losses_of(launched)


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys", "why"),
    [
        ("tp", 3, {"tp": 3}, "gpt2-tiny has 4 attention heads (n_head), found tp: 3. Allowed tp: 1, 2, 4."),
        ("tp-pp", 6, {"tp": 3, "pp": 2, "accumulation": 2}, "4 attention heads (n_head), found tp: 3"),
        ("tp-fsdp2", 8, {"tp": 8}, "4 attention heads"),
        ("tp", 2, {"tp": 2, "options": SLICES, "workload": "vit-tiny"}, "sequence_parallel: vit-tiny has no sequences."),
        ("tp", 4, {"tp": 4, "options": SLICES, "seq_len": 66}, "does not divide the 66 positions of a sequence (seq_len)."),
        ("pp-gpipe", 5, {"pp": 5}, "gpt2-tiny has 4 blocks (n_layer), too few for 5 stages: found pp: 5. Allowed pp: up to 4."),
        ("pp-interleaved", 4, {"pp": 4, "accumulation": 4}, "8 stages: found pp: 4 with 2 stages per rank. Allowed pp: up"),
        ("pp-interleaved", 2, {"pp": 2, "accumulation": 5, "global_batch_size": 5}, "into 2 equal rounds on 2 ranks"),
        ("pp-1f1b", 2, {"pp": 2}, "for each of 2 stages: found 1 per step. Allowed: microbatches from 2."),
        ("pp-fsdp2", 4, {"pp": 2}, "Allowed: microbatches from 2."),
    ],
)
def test_an_impossible_model_parallel_cell_is_refused_before_a_rank_starts(bench, strategy, gpus, keys, why):
    cell = bench.run_dir(strategy=strategy, gpus=gpus, **keys).read_run().cell
    assert why in menu.find_strategy(strategy).refuse(cell)


@pytest.mark.parametrize(("strategy", "what"), [("tp", "tp cannot split"), ("pp-gpipe", "pp-gpipe cannot divide")])
def test_a_workload_without_a_plan_is_refused(bench, monkeypatch, strategy, what):
    bare = {
        name: msgspec.structs.replace(workload, heads=None, blocks=None) if name == "gpt2-tiny" else workload
        for name, workload in menu.load_workloads().items()
    }
    monkeypatch.setattr(menu, "load_workloads", lambda: bare)
    cell = bench.run_dir(strategy=strategy, gpus=2, **{strategy[:2]: 2}).read_run().cell
    why = menu.find_strategy(strategy).refuse(cell)
    assert what in why
    able = [name for name, workload in bare.items() if workload.heads is not None]
    assert why.endswith(f"Allowed workloads: {', '.join(able)}.")
    assert {"vit-tiny", "llm-7b"} <= set(able)
    assert not {"gpt2-tiny", "resnet50"} & set(able)
