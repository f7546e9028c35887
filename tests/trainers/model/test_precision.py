"""16-bit precisions: in which dtype each part computes, that the work is that of one process, and that a step whose gradients
overflow is skipped."""

import msgspec
import pytest
import torch
from support_fork import FORK_RANKS
from support_long import LONG, only_long

from tests.trainers.proof.test_trainers_proof import BROKEN, prove
from trainers import menu
from trainers.model import loss_scaling

pytest_plugins = ["support_trainers"]
WEIGHTS = {
    "bf16-pure": "bfloat16",
    "fp16": "float32",
    "bf16": "float32",
    "bf16-autocast": "float32",
    "fp16-autocast": "float32",
}
FAMILIES = (
    ("single", 1, {"accumulation": 2}),
    ("ddp", 2, {"accumulation": 2}),
    ("fsdp1-full-shard", 2, {"accumulation": 2}),
    ("fsdp1-no-shard", 2, {"workload": "vit-tiny"}),
    ("fsdp1-hybrid-shard-zero2", 4, {}),
    ("fsdp2", 2, {"accumulation": 2, "workload": "vit-tiny"}),
    ("fsdp2-hsdp", 4, {}),
    ("tp", 2, {"tp": 2, "options": {"sequence_parallel": True}}),
    ("pp-1f1b", 2, {"pp": 2, "accumulation": 2, "workload": "vit-tiny"}),
    ("pp-interleaved", 2, {"pp": 2, "accumulation": 4}),
    ("tp-fsdp2", 4, {"tp": 2}),
    ("tp-pp", 4, {"tp": 2, "pp": 2, "accumulation": 2}),
    ("pp-fsdp2", 4, {"pp": 2, "accumulation": 2}),
    ("ps-sync", 2, {"servers": 1}),
)
# WHOLE and SHARDED contain the cells for precisions other than fp16. Some of these cells are also in FAMILIES.
WHOLE = (
    ("single", 1, {"accumulation": 2}),
    ("ddp", 2, {"accumulation": 2, "activation_checkpointing": "full"}),
    ("tp", 2, {"tp": 2, "options": {"sequence_parallel": True}}),
    ("pp-1f1b", 2, {"pp": 2, "accumulation": 2}),
    ("ps-sync", 2, {"servers": 1}),
)
SHARDED = (("fsdp1-full-shard", 2, {}), ("fsdp2", 2, {"workload": "vit-tiny"}))
PURE_ONLY = (("zero2", 2, {"accumulation": 2}), ("zero1", 2, {}), ("zero3", 2, {}), ("fsdp1-no-shard", 2, {"accumulation": 2}))
SHORT = {"seq_len": 32}  # 16-bit products are slow on a CPU, and the length of a sequence changes no dtype
# A dtype is a property of an engine, and each of these strategies has its own engine. Only `make test-long` tests the other
# strategies.
ENGINES = ("ddp", "fsdp1-full-shard", "fsdp2", "tp", "pp-1f1b", "ps-sync", "zero2")
# Engines cast for bf16 as for fp16, which also scales the loss, so few of them compute in bf16 outside of `make test-long`.
BF16_ENGINES = {"bf16": ("ddp",), "bf16-autocast": ("ddp", "tp", "pp-1f1b")}
# A program that forks ranks, which make three steps. In the first step, the loss scale makes all gradients overflow; in the
# second, a gradient overflows on rank 1 only; the third is normal. After each step it prints, for each rank, the loss scale,
# the number of skipped steps, and whether the weights changed.
STEPS = """
import json, math, os, sys, tempfile
import msgspec, torch
from pathlib import Path
from shardlab.matrix.cell import Cell
from trainers import menu
from trainers.data.order import PROOF, DataOrder
from trainers.instruments.timing import make_clock
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks

cell = msgspec.json.decode(sys.argv[1], type=Cell)
WHOLE_ON_EVERY_RANK = ("single", "ddp", "fsdp1-no-shard", "ps-sync")  # where an overflow has to come before the reduction

def overflow(engine, once=[True]):
    scaler = engine.scaler
    scaled, unscale = scaler.scale_loss, scaler.unscale
    if cell.strategy in WHOLE_ON_EVERY_RANK:
        scaler.scale_loss = lambda loss: scaled(loss) * math.inf
    else:
        def with_one_infinite(gradients):
            gradients = list(gradients)
            getattr(gradients[0], "_local_tensor", gradients[0]).fill_(math.inf)
            unscale(gradients)
        scaler.unscale = with_one_infinite
    def undo():
        scaler.scale_loss, scaler.unscale = scaled, unscale
    return undo

def steps(number, ranks):
    task, strategy = menu.find_workload(cell.workload).build(cell, Path(sys.argv[2])), menu.find_strategy(cell.strategy)
    torch.manual_seed(cell.seed)
    seen = []
    if number >= cell.gpus:
        strategy.build_server(cell, task, ranks).serve()
        seen = [0.0] * 9
    else:
        engine = strategy.build(cell, task, ranks)
        order, clock = DataOrder(task.source.items, cell.global_batch_size, cell.seed), make_clock(ranks.device)
        for step, scale in enumerate((2.0**60, 2.0**10, 2.0**10)):
            engine.start_loss_scale(scale)
            undo = overflow(engine) if step == 1 and number == cell.gpus - 1 else lambda: None
            before = [getattr(p, "_local_tensor", p).detach().clone() for p in engine.model.parameters()]
            parts = order.list_micro_batches(
                PROOF, step, slice_index=engine.data_rank, slice_count=engine.data_ranks,
                micro_batch_size=cell.micro_batch_size)
            clock.start()
            engine.forward_backward([task.fetch(indices, ranks.device) for indices in parts], clock)
            engine.update()
            undo()
            after = [getattr(p, "_local_tensor", p).detach() for p in engine.model.parameters()]
            moved = any(bool((a != b).any()) for a, b in zip(after, before))
            seen += [engine.effective_scale()[0], engine.effective_scale()[1], float(moved)]
        engine.close()
    return seen

def rank(number, store):
    ranks = Ranks(Rank(number, number, cell.world_size, store))
    everyone = ranks.all_gather_numbers(steps(number, ranks))  # the engine is gone before its group: torch can hang otherwise
    if number == 0:
        print(json.dumps(everyone.tolist()[: cell.gpus]))
    ranks.leave_group()

from trainers.replicated import ReplicatedEngine
ReplicatedEngine.effective_scale = lambda self: (self.scaler.scale, float(self.scaler.skipped_steps))
"""


def cell_of(bench, **keys):
    return msgspec.structs.replace(bench.run_dir(**SHORT | keys).read_run().cell, prove="auto")


def difference(one, other):
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("precision", "strategy", "gpus", "keys"),
    [
        (precision, *family)
        for precision, families in (
            ("bf16-pure", (*FAMILIES, *PURE_ONLY)),
            ("fp16", FAMILIES),
            ("bf16", (*WHOLE, *SHARDED)),
            ("bf16-autocast", WHOLE),
            ("fp16-autocast", WHOLE[1:2]),
        )
        for family in families
        if LONG or family[0] in BF16_ENGINES.get(precision, ENGINES)
    ],
)
def test_each_precision_does_the_work_of_one_process_in_its_dtypes(bench, precision, strategy, gpus, keys):
    shape = keys if "workload" in keys else SHORT | keys  # images have no length
    result = bench.complete(strategy=strategy, gpus=gpus, precision=precision, prove="auto", steps=2, **shape).read_result()
    proof, found = result.same_work, result.knobs["effective"]
    assert proof.verdict == "proven", proof.why
    assert proof.communication_bytes["counted"] == pytest.approx(proof.communication_bytes["theory"], rel=0.02)
    weights = WEIGHTS[precision]
    assert found["weights_dtype"] == found["optimizer_state_dtype"] == weights
    assert found["output_dtype"] == ("float16" if precision.startswith("fp16") else "bfloat16")
    assert found.get("gradients_reduced_as", weights) == weights
    if precision.startswith("fp16"):
        assert found["loss_scale"] * 2 ** found["skipped_steps"] == loss_scaling.START_SCALE
    else:
        assert "loss_scale" not in found


@pytest.mark.parametrize(("strategy", "keys"), [("zero0", {}), ("zero1", {}), ("zero3", {"accumulation": 2})])
def test_deepspeed_computes_in_bf16_with_fp32_weights_in_its_optimizer(bench, strategy, keys):
    result = bench.complete(strategy=strategy, gpus=2, precision="bf16", prove="auto", steps=2, **SHORT, **keys).read_result()
    found = result.knobs["effective"]
    assert result.same_work.verdict == "proven", result.same_work.why
    assert (found["weights_dtype"], found["output_dtype"]) == ("bfloat16", "bfloat16")
    assert (found["optimizer_state_dtype"], found["gradients_reduced_as"]) == ("float32", "float32")


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys"),
    [
        ("ddp", 2, {}),
        ("fsdp1-full-shard", 2, {}),
        ("fsdp2", 2, {"options": {"offload": "cpu"}}),
        ("tp-pp", 4, {"tp": 2, "pp": 2, "accumulation": 2}),
        ("pp-fsdp2", 4, {"pp": 2, "accumulation": 2}),
        ("ps-sync", 2, {"servers": 1}),
        *only_long(("single", 1, {}), ("tp", 2, {"tp": 2}), ("pp-1f1b", 2, {"pp": 2, "accumulation": 2})),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(bench, strategy, gpus, keys):
    words = [msgspec.json.encode(cell_of(bench, strategy=strategy, gpus=gpus, precision="fp16", **keys)).decode()]
    done = bench.scripts.run(STEPS + FORK_RANKS, *words, str(bench.data))
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout) == [[2.0**59, 1, 0, 2.0**9, 2, 0, 2.0**10, 2, 1]] * gpus


@pytest.mark.parametrize(("strategy", "gpus", "keys"), [("fsdp1-full-shard", 2, {}), ("tp", 2, {"tp": 2}), ("ddp", 2, {})])
def test_clipping_works_on_gradients_of_their_true_size(bench, strategy, gpus, keys):
    """Gradients must be divided by the loss scale before they are clipped. The losses may differ by 0.022 from those in fp32:
    two roundings of bf16, which is coarser than fp16, change the largest loss by no more. The runs have five steps, because in
    the sixth step the gradients of fsdp1 overflow and fsdp1 correctly skips it."""
    ours = bench.losses(strategy=strategy, gpus=gpus, precision="fp16", max_grad_norm=0.1, steps=5, **keys)
    assert difference(ours, bench.losses(max_grad_norm=0.1, steps=5)) < 0.022
    assert difference(ours, bench.losses(steps=5)) > 0.1


@pytest.mark.parametrize(
    ("precision", "broken"),
    [("bf16-pure", broken) for broken in BROKEN]  # the coarsest precision, so the proof allows the largest differences
    + [(precision, broken) for precision in ("fp16", "bf16") for broken in (BROKEN if LONG else [*BROKEN][:1])],
)
def test_wrong_work_is_called_different(bench, broken, precision):
    found = prove(bench, cell_of(bench, strategy="ddp", gpus=2, precision=precision), BROKEN[broken])
    assert found.verdict == "different", found.why


@pytest.mark.parametrize(
    ("precision", "broken"),
    [
        ("fp16", "proof.LOSS_SCALE = 2.0**60"),  # gradients overflow in every step, so no weight changes
        # The updates are so small that rounding removes them.
        ("bf16-pure", "proof.SGD = msgspec.structs.replace(proof.SGD, lr=1e-30)"),
    ],
)
def test_two_ways_that_both_do_nothing_are_no_proof(bench, precision, broken):
    found = prove(bench, cell_of(bench, strategy="ddp", gpus=2, precision=precision), broken)
    assert (found.verdict, found.loss_difference) == ("not provable", None), found.why


@pytest.mark.parametrize(
    ("workload", "precision"),
    [("gpt2-tiny", "fp16"), ("vit-tiny", "bf16"), *only_long(("gpt2-tiny", "bf16"), ("vit-tiny", "fp16"))],
)
def test_one_process_computes_what_fully_shard_computes_on_one_rank(bench, workload, precision):
    """On one rank, fully_shard has nothing to shard and only casts the weights. A single process must cast in the same way;
    autocast would compute something else."""
    keys = {"workload": workload, "steps": 4}
    ours, sharded = (bench.losses(strategy=name, precision=precision, **keys) for name in ("single", "fsdp2"))
    assert ours == sharded
    assert ours != bench.losses(strategy="single", precision=f"{precision}-autocast", **keys)


@pytest.mark.parametrize("strategy", ["fsdp1-full-shard", "fsdp2"])
def test_the_weights_of_batch_norm_are_rounded_under_every_strategy(bench, strategy):
    """By default, FSDP1 keeps the weights of BatchNorm in fp32. shardlab rounds them to fp16, so that FSDP1 computes
    the same as other strategies."""
    keys = {"workload": "resnet50-tiny", "seq_len": None, "precision": "fp16", "prove": "auto", "steps": 1}
    work = bench.complete(strategy=strategy, **keys).read_result().same_work
    assert (work.verdict, work.loss_difference) == ("proven", 0.0), work.why


def test_the_scale_grows_after_steps_in_a_row_and_is_halved_by_an_overflow():
    """The loss scale doubles after INTERVAL steps without overflow. An overflow halves it and skips the step."""
    scaler, fine, overflowed = loss_scaling.LossScaler(torch.device("cpu")), torch.tensor(0.0), torch.tensor(2.0)
    assert all(scaler.decide_step(fine) for _ in range(loss_scaling.GROWTH_INTERVAL - 1))
    assert (scaler.decide_step(overflowed), scaler.scale, scaler.skipped_steps) == (False, 32768, 1)
    assert all(scaler.decide_step(fine) for _ in range(loss_scaling.GROWTH_INTERVAL))
    assert (scaler.scale, scaler.skipped_steps) == (65536, 1)


@pytest.mark.parametrize(
    ("strategy", "precision", "why"),
    [
        ("ddp-powersgd", "fp16", "cannot honour fp16: the compression error of a step"),
        ("zero0", "bf16-pure", "cannot honour bf16-pure: without ZeRO, DeepSpeed keeps an fp32 copy"),
        ("fsdp2", "bf16-autocast", "cannot honour bf16-autocast: the strategy itself casts the weights to 16 bits"),
        ("zero2", "fp16", "DeepSpeed's fp16 needs a GPU, and the launcher fork runs ranks on the CPU."),
    ],
)
def test_an_unsupported_precision_is_refused_before_a_rank_starts(bench, strategy, precision, why):
    cell, variant = cell_of(bench, strategy=strategy, gpus=2, precision=precision), menu.find_strategy(strategy)
    assert why in (variant.refuse_precision(precision) or variant.refuse(cell))


def test_deepspeeds_fp16_is_refused_on_a_cpu(bench):
    run_dir = bench.run_dir(strategy="zero1", gpus=1, precision="fp16", launcher="torchrun")
    code, errors = bench.finish(run_dir)
    assert code == 1
    assert "DeepSpeed's fp16 needs a GPU, and this rank has none. Allowed: bf16." in errors
