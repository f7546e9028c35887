"""The formula of memory, compared with rehearsals: both predict the peak of the tensors of a step, and share no code but the
facts of precisions. The cells are drawn at random, but the same cells in every run of the tests."""

import random

import pytest
from support_long import LONG
from support_planner import cell
from support_rehearsal import Rehearser

from jobs.planner import memory
from shardlab.matrix.cell import Optimizer
from shardlab.runs.rehearsed import Rehearsed
from trainers import menu

SEED = 41
ALLOWED = memory.FORMULA_ERROR
# (workload, numbers of blocks, lengths of a sequence, sizes of a micro-batch)
MODELS = (
    ("gpt2", (4, 8, 12), (512, 1024), (1, 2, 4, 8)),
    ("gpt2-large", (8, 12, 24, 36), (512, 1024), (1, 2, 4, 8)),
    ("llm-1.3b", (4, 8, 24), (1024, 2048, 4096), (1, 2, 4, 8)),
    ("llm-7b", (4, 8, 12), (1024, 2048, 4096), (1, 2, 4, 8)),
    ("vit-b-32", (6, 12), (None,), (16, 64)),
)
SMALL_MODELS = (
    ("gpt2", (2, 4), (128, 256), (1, 2)),
    ("llm-1.3b", (2, 4), (128, 256), (1, 2)),
    ("vit-b-32", (6, 12), (None,), (8, 16)),
)
# Parameter servers and PowerSGD are left out: of servers, and of the matrices of PowerSGD, the formula knows nothing.
STRATEGIES = tuple(name for name, one in menu.load_strategies().items() if not one.servers and name != "ddp-powersgd")
OPTIMIZERS = (Optimizer("adamw", 1e-4), Optimizer("adamw", 1e-4, fused=False), Optimizer("sgd", 0.1, momentum=0.9))
CHECKPOINTING = ("none", "none", "full", "full", "every-2", "segments-2")


def draw_cell(numbers, models):
    """Draws a cell that can be trained."""
    while True:
        workload, blocks, lengths, micros = numbers.choice(models)
        strategy = menu.find_strategy(numbers.choice(STRATEGIES))
        degrees = {degree: numbers.choice((2, 4, 8) if degree == "dp" else (2, 4)) for degree in strategy.degrees}
        names = {option.name for option in (*strategy.options, *menu.find_workload(workload).options)}
        options = {"n_layer": numbers.choice(blocks)}
        for name, values in (
            ("sequence_parallel", (True, False)), ("pad_vocabulary", (1, 64)), ("gelu", ("fused", "unfused")),
            ("reduce_bucket_size", (None, 10_000_000, 200_000_000)), ("gradient_as_bucket_view", (True, False)),
        ):  # fmt: skip
            options |= {name: numbers.choice(values)} if name in names else {}
        keys = {"precision": numbers.choice(strategy.precisions), "activation_checkpointing": numbers.choice(CHECKPOINTING)}
        tp, pp = degrees.get("tp", 1), degrees.get("pp", 1)
        gpus = 1 if strategy.name == "single" else degrees.get("dp", 1) * tp * pp
        drawn = cell(
            workload, strategy.name, gpus, micro=numbers.choice(micros), passes=numbers.choice((1, 1, 2, 4, 8)), tp=tp, pp=pp,
            options=options, optimizer=numbers.choice(OPTIMIZERS), seq_len=numbers.choice(lengths), **keys,
        )  # fmt: skip
        segments = keys["activation_checkpointing"].startswith("segments") and strategy.degrees != ("dp",)
        can_checkpoint = keys["activation_checkpointing"] == "none" or "activation_checkpointing" in strategy.switches
        if not segments and can_checkpoint and menu.refuse(drawn) is None:
            return drawn


def draw_cells(count, models):
    numbers = random.Random(SEED)
    return [draw_cell(numbers, models) for _ in range(count)]


def describe(drawn):
    sizes = (drawn.dp, drawn.tp, drawn.pp, drawn.micro_batch_size, drawn.gradient_accumulation_steps)
    return f"{drawn.workload}-{drawn.strategy}-{'x'.join(map(str, sizes))}-{drawn.precision}-{drawn.activation_checkpointing}"


@pytest.fixture(scope="module")
def rehearse():
    process = Rehearser()
    yield process
    process.close()


@pytest.mark.parametrize("drawn", draw_cells(30, MODELS) if LONG else draw_cells(6, SMALL_MODELS), ids=describe)
def test_the_formula_of_memory_agrees_with_a_rehearsal(rehearse, drawn):
    answer, _ = rehearse(drawn)
    assert isinstance(answer, Rehearsed), answer.why
    predicted = memory.predict_memory(drawn, on_gpu=False).bytes_by_category
    sizes = {name: round(span.likely) for name, span in predicted.items()}
    assert sum(sizes.values()) == pytest.approx(answer.worst_rank.peak_bytes, rel=ALLOWED), (sizes, answer.worst_rank.at_peak)


SHORT = {"options": {"n_layer": 2}, "seq_len": 64, "optimizer": Optimizer("sgd", 0.1)}


@pytest.mark.parametrize(("workload", "strategy", "keys"), [
    ("gpt2", "single", {}), ("gpt2", "ddp", {}), ("gpt2", "ddp", {"precision": "bf16"}), ("gpt2", "fsdp2", {}),
    ("llm-1.3b", "ddp", {}),
    ("gpt2", "zero2", {"micro": 4, "seq_len": 1024}),  # the logits are larger than DeepSpeed's buckets
])  # fmt: skip
def test_the_gradients_of_several_passes_are_known_where_they_are_the_peak(rehearse, workload, strategy, keys):
    """With few tokens and no state of the optimizer, the peak is in backward. GPT-2's embedding and head are one tied weight,
    with two gradients; LLaMA's are not."""
    one = cell(workload, strategy, 1 if strategy == "single" else 4, passes=2, **{**SHORT, **keys})
    answer, _ = rehearse(one)
    assert isinstance(answer, Rehearsed), answer.why
    predicted = memory.predict_memory(one, on_gpu=False).total_bytes.likely
    assert predicted == pytest.approx(answer.worst_rank.peak_bytes, rel=0.03)
