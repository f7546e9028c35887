"""FSDP1 whose weights rank 0 alone draws: the same weights, buffers and ties on every rank as where each draws its own."""

import pytest

pytest_plugins = ["support_trainers"]
DEFERRED = {"deferred_init": True}


def losses(run_dir):
    return [[record.loss for record in run_dir.steps(rank).records] for rank in range(run_dir.read_run().cell.gpus)]


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys"),
    [
        ("fsdp1-full-shard", 2, {"activation_checkpointing": "full", "accumulation": 2}),  # gpt2-tiny: tied weights
        ("fsdp1-full-shard", 2, {"options": {"wrap": "none"}}),
        ("fsdp1-shard-grad-op", 2, {"workload": "llm-1.3b-tiny", "seq_len": 64}),  # position frequencies: not persistent
        ("fsdp1-no-shard", 3, {"workload": "resnet50-tiny", "global_batch_size": 6}),  # statistics: integers among them
        ("fsdp1-hybrid-shard", 4, {"workload": "vit-tiny", "activation_checkpointing": "segments-2"}),
        ("fsdp1-hybrid-shard-zero2", 4, {"workload": "llm-1.3b-tiny", "seq_len": 64, "precision": "bf16"}),
    ],
)
def test_the_model_is_that_of_ranks_that_draw_their_own_weights(bench, strategy, gpus, keys):
    keys = {"strategy": strategy, "gpus": gpus, "steps": 3, "prove": "auto", **keys}
    own = bench.complete(**keys)
    ours = bench.complete(**{**keys, "options": {**keys.get("options", {}), **DEFERRED}})
    assert losses(ours) == losses(own)
    found, expected = ours.read_result(), own.read_result()
    assert (found.same_work.verdict, found.same_work.parameter_difference) == (
        "proven", expected.same_work.parameter_difference
    )  # fmt: skip
    assert found.communication_bytes == expected.communication_bytes
    assert found.parameters == expected.parameters
    assert found.knobs["effective"]["ranks_made_on_meta"] == gpus
    assert expected.knobs["effective"]["ranks_made_on_meta"] == 0
