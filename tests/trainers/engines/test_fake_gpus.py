"""The trainers' code for CUDA on fake GPUs (tests/support/fake_cuda): it does the same work, takes as much memory as predicted,
and never waits without need."""

import gzip
import json
import re
import shutil
import socket

import msgspec
import pytest
from fake_cuda import build
from support_long import only_long

from shardlab.files import files
from shardlab.matrix.cell import CheckpointSettings, Instruments, Optimizer, Validation
from shardlab.runs import checkpoint

pytest_plugins = ["support_trainers", "support_fake_gpus"]
pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=f"no fake GPUs: {build.why_not()}")
ADAMW = Optimizer(name="adamw", lr=1e-3)
LLAMA = {"workload": "llm-1.3b-tiny", "seq_len": 64}
SLICES = {"sequence_parallel": True}
CELLS = {
    "ddp in bf16": {"strategy": "ddp", "gpus": 2, "precision": "bf16", "accumulation": 2},
    "fsdp1 that offloads": {"strategy": "fsdp1-full-shard", "gpus": 2, "options": {"offload": "cpu"}},
    "fsdp2 that offloads": {"strategy": "fsdp2", "gpus": 2, "precision": "bf16", "options": {"offload": "cpu"}},
    "zero3 in bf16": {"strategy": "zero3", "gpus": 2, "precision": "bf16"},
    "tp-fsdp2": {"strategy": "tp-fsdp2", "gpus": 4, "tp": 2, "precision": "bf16"},
    "pp-1f1b": {"strategy": "pp-1f1b", "gpus": 2, "pp": 2, "accumulation": 2, "precision": "bf16"},
    "ps-sync": {"strategy": "ps-sync", "gpus": 2, "servers": 1, "precision": "bf16"},
}
MORE_CELLS = {
    "single in fp16": {"strategy": "single", "precision": "fp16", "accumulation": 2},
    "single in tf32": {"strategy": "single", "precision": "tf32"},
    "ddp in fp32": {"strategy": "ddp", "gpus": 2},
    "ddp in bf16-autocast": {"strategy": "ddp", "gpus": 2, "precision": "bf16-autocast"},
    "ddp in fp16": {"strategy": "ddp", "gpus": 2, "precision": "fp16"},
    "ddp with a hook": {"strategy": "ddp", "gpus": 2, "precision": "bf16", "options": {"comm_hook": "bf16"}},
    "fsdp1 in fp16": {"strategy": "fsdp1-full-shard", "gpus": 2, "precision": "fp16", "accumulation": 2},
    "fsdp1 of hybrid shards": {"strategy": "fsdp1-hybrid-shard", "gpus": 4, "precision": "bf16"},
    "fsdp2 in fp16": {"strategy": "fsdp2", "gpus": 2, "precision": "fp16", "options": {"prefetch": 2}},
    "fsdp2 in bf16-pure": {"strategy": "fsdp2", "gpus": 2, "precision": "bf16-pure"},
    "fsdp2-hsdp": {"strategy": "fsdp2-hsdp", "gpus": 4, "precision": "bf16"},
    "fsdp2 of LLaMA": {"strategy": "fsdp2", "gpus": 2, "precision": "bf16", "activation_checkpointing": "full", **LLAMA},
    "zero0": {"strategy": "zero0", "gpus": 2, "precision": "bf16"},
    "zero1": {"strategy": "zero1", "gpus": 2, "precision": "bf16"},
    "zero2 in fp16": {"strategy": "zero2", "gpus": 2, "precision": "fp16"},
    "zero2 that offloads": {"strategy": "zero2", "gpus": 2, "precision": "bf16", "options": {"offload_optimizer": "cpu"}},
    "zero3 that offloads": {
        "strategy": "zero3", "gpus": 2, "precision": "bf16", "options": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    },
    "zero3 of two copies": {"strategy": "zero3", "gpus": 4, "precision": "bf16", "options": {"hpz_partition_size": 2}},
    "tp with slices": {"strategy": "tp", "gpus": 2, "tp": 2, "precision": "bf16", "options": SLICES},
    "tp-fsdp2 of LLaMA": {"strategy": "tp-fsdp2", "gpus": 4, "tp": 2, **LLAMA},
    "pp-gpipe": {"strategy": "pp-gpipe", "gpus": 2, "pp": 2, "accumulation": 2},
    "pp-interleaved": {"strategy": "pp-interleaved", "gpus": 2, "pp": 2, "accumulation": 4, "precision": "fp16"},
    "tp-pp-fsdp2": {"strategy": "tp-pp-fsdp2", "gpus": 8, "tp": 2, "pp": 2, "accumulation": 2, "precision": "bf16"},
    "ps-sync in fp16": {"strategy": "ps-sync", "gpus": 2, "servers": 2, "precision": "fp16"},
    "a vision transformer": {"strategy": "ddp", "gpus": 2, "precision": "bf16", "workload": "vit-tiny", "max_grad_norm": 0.5},
    "a convolutional network": {"strategy": "fsdp2", "gpus": 2, "workload": "vgg16-tiny", "precision": "bf16"},
}  # fmt: skip


@pytest.mark.parametrize("name", [*CELLS, *only_long(*MORE_CELLS)])
def test_a_strategy_on_fake_gpus_does_the_work_of_one_process(gpus, name):
    run_dir = gpus.complete(prove="auto", **(CELLS | MORE_CELLS)[name])
    result = run_dir.read_result()
    assert result.same_work.verdict == "proven", result.same_work.why
    assert not result.rehearsal, "the ranks computed on GPUs"
    counted, theory = (result.communication_bytes[which] for which in ("counted", "theory"))
    assert counted == pytest.approx(theory, rel=0.02)
    cell = run_dir.read_run().cell
    assert result.gpus == [f"GPU-00000000-0000-0000-0000-{number:012d}" for number in range(cell.gpus)]
    assert all(record.allocated_bytes > 0 for rank in range(cell.gpus) for record in run_dir.steps(rank).records)


def test_categories_of_memory_add_up_to_the_allocated_memory_of_the_gpu(gpus):
    run_dir = gpus.complete(
        strategy="fsdp2",
        gpus=2,
        precision="bf16",
        steps=4,
        optimizer=ADAMW,
        prove="off",
        instruments=Instruments(memory="categories"),
    )
    found = run_dir.read_result().instruments["memory"]
    peak = max(record.allocated_bytes for record in run_dir.steps(0).records)
    assert sum(found["peak_bytes"].values()) == pytest.approx(peak, rel=0.02)
    assert found["peak_bytes"]["unknown"] < 0.01 * peak
    assert {"parameter", "optimizer_state", "activation", "gathered"} <= {
        name for name, size in found["peak_bytes"].items() if size
    }


def test_the_allocators_snapshot_is_kept(gpus):
    """The snapshot of the memory allocator is invented by the fake GPU. The test checks that our code requests the snapshot and
    writes it to a file."""
    run_dir = gpus.complete(strategy="single", steps=4, prove="off", instruments=Instruments(memory="snapshot"))
    assert run_dir.read_result().instruments["memory"]["step"] == 2  # in the first step, the optimizer allocates its state
    snapshot = json.loads(gzip.decompress(run_dir.snapshot_file(0).read_bytes()))
    assert (snapshot["rank"], snapshot["step"]) == (0, 2)
    assert [block["size"] for segment in snapshot["segments"] for block in segment["blocks"]] == [512]
    ((allocation,),) = snapshot["device_traces"]  # the history was recorded in one step
    assert allocation["frames"], "the call stacks were recorded"
    seen = json.loads(run_dir.environment_file(socket.gethostname()).read_text())["torch"]
    assert (seen["device"], seen["cuda"], seen["nccl"], seen["backend"]) == ("NVIDIA H100 80GB HBM3", "13.0", "2.28.9", "nccl")


@pytest.mark.parametrize("strategy", ["single", "zero2", *only_long("ddp", "fsdp1-full-shard", "fsdp2", "zero3")])
def test_a_rank_uses_the_memory_of_its_own_gpu_and_a_peak_is_that_of_one_step(gpus, strategy):
    """At some sites, each task of Slurm sees only its own GPU, so the number of the GPU is not the local rank."""
    cell = {"strategy": strategy, "steps": 6, "optimizer": ADAMW}
    found = gpus.check("one_gpu", cell=cell, index=3, local_rank=1)
    assert found["used_on"] == [3]
    assert all(0 < peak < found["held"] for peak in found["peaks"])  # the memory that was held before the steps is not counted
    assert found["waits"] >= 6, "each step waits for its batch, which another stream copies"
    assert found["losses"] == pytest.approx(gpus.bench.reference(steps=6, optimizer=ADAMW), rel=1e-4)
    assert len(set(found["losses"])) == 6


@pytest.mark.parametrize("strategy", ["fsdp2", *only_long("ddp", "fsdp1-full-shard", "zero2", "zero3")])
def test_a_run_on_fake_gpus_resumes_from_its_checkpoint(gpus, strategy):
    """The tensors of a checkpoint are saved from the memory of the GPU and loaded back into it."""
    keys = {"strategy": strategy, "gpus": 2, "precision": "bf16", "prove": "off", "optimizer": ADAMW, "steps": 4}
    keys |= {
        "instruments": Instruments(
            checkpoints=CheckpointSettings(every_steps=2), validation=Validation(every_steps=2, items=16)
        )
    }
    undisturbed = gpus.complete(**keys)
    shutil.rmtree(checkpoint.make_checkpoint_path(undisturbed.path, 4))
    again = gpus.bench.run_dir(**{"launcher": "torchrun", **keys})
    files.write_json(again.run_json, msgspec.structs.replace(again.read_run(), resume=[undisturbed.run_id]))
    assert gpus.again(again, 2) == [0, 0]
    assert again.read_result().resumed_from_step == 2
    for rank in (0, 1):
        assert [one.loss for one in again.steps(rank).records] == [one.loss for one in undisturbed.steps(rank).records]


def test_a_run_whose_second_gpu_runs_out_of_memory_names_the_stage(gpus):
    run_dir, codes = gpus.run(2, small_gpu=1, strategy="ddp", gpus=2, prove="off")
    assert 0 not in codes
    (said,) = [event.data for event in run_dir.read_events() if event.event == "oom"]
    assert said["stage"] == "building"
    assert re.match(r"OutOfMemoryError: CUDA out of memory\. Tried to allocate \d+ bytes\. GPU 1 ", said["why"])
    assert said["why"].endswith(" (while building)")
    assert not run_dir.result.exists()


# (keys of the cell, how often the host may wait for the GPU in a step). With fp16, the host reads whether gradients overflowed.
# FSDP1 gathers at most two blocks ahead, and waits for an earlier block before it gathers another one. DeepSpeed synchronizes,
# and reads the norm of the gradients.
WAITS = {
    "single": ({"strategy": "single", "precision": "bf16"}, 0),
    "single in fp16": ({"strategy": "single", "precision": "fp16"}, 1),
    "a vision transformer": ({"strategy": "single", "precision": "bf16", "workload": "vit-tiny"}, 0),
    "clipping": ({"strategy": "single", "precision": "bf16", "max_grad_norm": 1.0}, 0),
    "ddp": ({"strategy": "ddp", "precision": "bf16", "accumulation": 2}, 0),
    "fsdp1": ({"strategy": "fsdp1-full-shard", "gpus": 2, "precision": "bf16", "accumulation": 2}, 18),
    "fsdp2": ({"strategy": "fsdp2", "gpus": 2, "precision": "bf16", "accumulation": 2}, 0),
    "tp": ({"strategy": "tp", "precision": "bf16"}, 0),
    "pp-1f1b": ({"strategy": "pp-1f1b", "precision": "bf16", "accumulation": 2}, 0),
    "zero1": ({"strategy": "zero1", "precision": "bf16"}, 3),
    "zero2": ({"strategy": "zero2", "precision": "bf16"}, 5),
    "zero3": ({"strategy": "zero3", "precision": "bf16"}, 5),
}


ALWAYS = ("single in fp16", "clipping", "ddp", "fsdp1", "fsdp2", "pp-1f1b", "zero3")


@pytest.mark.parametrize("name", [*ALWAYS, *only_long(*(name for name in WAITS if name not in ALWAYS))])
def test_the_host_waits_for_nothing_that_the_algorithm_does_not_need(gpus, name):
    keys, allowed = WAITS[name]
    found = gpus.check("waits", cell={"steps": 6, "warmup_steps": 2, "optimizer": ADAMW, **keys})
    # In each step, the clock waits for the end of the previous step, so the host is never more than one step ahead of the GPU.
    # This is the additional wait in each of the 6 steps.
    assert sum(found.values()) == 6 * (1 + allowed), found
    assert sum(count for line, count in found.items() if "instruments/timing.py" in line) == 6


# (strategy, options, the memory that one of 8 ranks holds after building the model, the additional memory that the library
# needs while building). Both amounts of memory are fractions of the size of all weights in fp32.
HELD = [
    ("fsdp1-full-shard", {}, 1 / 8, 0.125),  # FSDP1 copies a block into a flat tensor
    ("fsdp2", {}, 1 / 8, 0.0),
    ("zero2", {}, 0.5 + 1 / 8, 0.5),  # DeepSpeed copies the bf16 weights into flat memory
    ("zero3", {"reduce_bucket_size": 1_000}, (0.5 + 1 + 1) / 8, 0.0),  # weights in bf16 and fp32, gradients in fp32
    *only_long(
        ("fsdp2-hsdp", {"replicas": 2}, 2 / 8, 0.0),
        # A rank holds all weights in bf16, its part of the weights in fp32, and all gradients in fp32.
        ("zero1", {}, 0.5 + 1 / 8 + 1.0, 0.0),
    ),
]


@pytest.mark.parametrize(("strategy", "options", "share", "besides"), HELD, ids=[one[0] for one in HELD])
def test_building_a_model_takes_at_most_the_memory_of_its_shard_and_a_block(gpus, strategy, options, share, besides):
    model = {"n_layer": 8, "n_embd": 256, "n_head": 8}
    cell = {"strategy": strategy, "gpus": 8, "precision": "bf16", "optimizer": ADAMW, "options": model | options}
    found = gpus.check("one_rank_of", world=8, cell=cell)
    held = share * found["weights"]
    assert found["built"] <= 1.05 * held
    assert found["building"] <= 1.15 * held + found["block"] + besides * found["weights"]


LAYERS, WIDTH = 8, 256
# How many elements of a GPT-2 block tensor parallelism shards: all except two biases and two layer norms.
SHARDED = 12 * WIDTH**2 + 7 * WIDTH
# The bytes that a rank holds only while it builds the model with tensor parallelism: a copy of a linear layer's weight,
# because GPT-2 stores these weights transposed, and the whole embedding, because it is tied to the head.
COPIED = 4 * 4 * WIDTH**2 + 4 * 256 * WIDTH


@pytest.mark.parametrize(("strategy", "copied"), [("tp", COPIED), ("pp-1f1b", 0)])
def test_building_a_part_of_a_model_takes_no_more_than_the_part_and_a_block(gpus, strategy, copied):
    """Rank 0 of 8 holds an eighth of each block and of the embedding of 256 tokens (tp), or one of eight blocks and the whole
    embedding (pp). It also holds the embedding of positions."""
    model = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 8}
    cell = {"strategy": strategy, "gpus": 8, "precision": "bf16", "optimizer": ADAMW, "options": model}
    cell |= {"tp": 8} if strategy == "tp" else {"pp": 8, "accumulation": 8}
    found = gpus.check("one_rank_of" if strategy == "tp" else "one_stage_of", world=8, cell=cell)
    # The bytes of the model that only other ranks hold. With pipeline parallelism, these include a layer norm on the last
    # stage.
    elsewhere = 4 * 7 * (SHARDED + 256 // 8 * WIDTH) if strategy == "tp" else 7 * found["block"] + 4 * 2 * WIDTH
    held = found["weights"] - elsewhere
    assert held <= found["built"] <= 1.05 * held
    assert found["building"] <= 1.15 * held + found["block"] + copied


@pytest.mark.parametrize(
    ("strategy", "keys", "share"),
    [
        ("fsdp2", {}, 1 / 64),
        ("tp-fsdp2", {"tp": 4}, 1 / 60),  # tensor parallelism shards neither the positions nor norms and some biases
        # With ZeRO-3, the part of a rank is 2.5 / 64 of all weights, plus the padding that DeepSpeed adds to each parameter.
        ("zero3", {"options": {"reduce_bucket_size": 1_000}}, 3 / 64),
        *only_long(("fsdp1-full-shard", {}, 1 / 64), ("fsdp2-hsdp", {"options": {"replicas": 8}}, 8 / 64)),
    ],
)
def test_rank_0_of_64_holds_its_part_and_steps(gpus, strategy, keys, share):
    cell = {"strategy": strategy, "gpus": 64, "precision": "bf16", "optimizer": ADAMW, "global_batch_size": 64, **keys}
    found = gpus.check("one_rank_of", world=64, cell=cell)
    assert found["built"] <= 1.1 * share * found["weights"]
    assert found["stepping"] > found["built"]
