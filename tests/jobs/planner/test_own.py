"""Predictions for models that do not ship with shardlab and in which nothing was counted: their memory is a true lower bound,
and what is unknown is never a reason to leave a cell out. `test_own_counts.py` is about models with counts."""

from pathlib import Path

import msgspec
import pytest
from support_configured import described, model_of
from support_long import only_long
from support_own import cell_of
from support_own import described as described_code
from support_planner import ADAMW, cell
from support_rehearsal import Rehearser

from jobs.planner import exchanges, gpu, link, memory, model_facts, planner_table, predict
from jobs.planner.machine import PlannedMachine
from shardlab.plugins.plugin_kind import ModelCounts, OwnWorkload
from shardlab.registry import Option
from shardlab.runs.prediction import make_exact_range
from shardlab.runs.rehearsed import Rehearsed
from trainers import menu

GIB = 1 << 30
A100 = PlannedMachine(
    True,
    "a100-80gb",
    gpu.must_find_gpu_model("a100-80gb"),
    make_exact_range(80 * GIB),
    link.make_data_sheet_link(gpu.must_find_gpu_model("a100-80gb")),
)
SHARED = """\
"Two blocks, used in turns."
import torch
from torch import nn
ITEMS = 8
def model(width: int = 4) -> nn.Module:
    first, second = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Linear(3, width), nn.Sequential(first, second, first), nn.Linear(width, 2))
def batch(items):
    return torch.ones(len(items), 3), items % 2
"""


def own_model(sizes, outside, *, unit="tokens", file="mine.json", options=(), code="0" * 16):
    """Adds a model of the workspace to the menu, with blocks of these numbers of parameters; returns its description."""
    options = (Option("n_layer", len(sizes), "blocks", least=1, most=len(sizes)), *options)
    known = OwnWorkload(
        name="mine", summary="", code=code, file=file, unit=unit, parameters=sum(sizes) + outside, flops_per_unit=1e9,
        flops_source="", optimizer=ADAMW, options=options, block_parameters=tuple(sizes), seq_len=64, most_stages=len(sizes),
    )  # fmt: skip
    menu.add_own_workload(known, Path(file))
    return known


def in_place_of(shipped, known):
    """A cell like `shipped` that trains the model `known`."""
    options = {option.name: option.default for option in (*menu.find_strategy(shipped.strategy).options, *known.options)}
    kept = {name: value for name, value in shipped.options.items() if name in options and name != "n_layer"}
    return msgspec.structs.replace(
        shipped, workload=known.name, workload_code=known.code, seq_len=known.seq_len, options=options | kept
    )


def equal_in_shape(workload):
    """A model of the workspace that has the blocks and the other parameters of a shipped workload."""
    facts = model_facts.find_model_facts(cell(workload))
    outside = facts.parameters - facts.block_count * facts.block_parameters
    return own_model((facts.block_parameters,) * facts.block_count, outside, code=workload.rjust(16, "0"))


def mesh(strategy):
    """The degrees of a strategy on 8 GPUs, with 2 ranks in each dimension besides data parallelism."""
    return {degree: 2 for degree in menu.find_strategy(strategy).degrees if degree != "dp"}


@pytest.mark.parametrize("strategy", menu.load_strategies())
@pytest.mark.parametrize("workload", ["llm-7b", "gpt2-large", "vit-b-32"])
def test_the_lower_bound_of_a_model_is_below_the_prediction_of_its_shipped_twin(workload, strategy):
    known = equal_in_shape(workload)
    for precision in ("fp32", "bf16"):
        for passes, checkpointing in ((1, "none"), (8, "none"), (8, "full")):
            keys = {"precision": precision, "activation_checkpointing": checkpointing}
            shipped = cell(workload, strategy, 8, passes=passes, micro=1, **mesh(strategy), **keys)
            bound, predicted = memory.predict_memory(in_place_of(shipped, known)), memory.predict_memory(shipped)
            assert not bound.is_complete
            assert 0 < bound.tensor_bytes.low <= predicted.tensor_bytes.low, shipped
            assert bound.total_bytes.low <= predicted.total_bytes.low, shipped


@pytest.mark.parametrize("tp", [2, 4])
def test_a_vocabulary_is_divided_once_if_activations_are_not_known(tp):
    """Of 1,000 rows of 64 numbers in the embedding and in the head, and two blocks, a rank has a part."""
    counts = ModelCounts(
        kind="transformer", block_flops=1e9, attention_flops=1e6, other_flops=1e8, vocabulary=1000, width=64, saved={},
        end_parameters=(64_000, 64_064, 0), reductions=(2, 5), splits_vocabulary=True,
    )  # fmt: skip
    known = msgspec.structs.replace(own_model((10_000, 10_000), 128_064, code="d" * 16), counts=counts)
    menu.add_own_workload(known, Path("mine.json"))
    found = memory.predict_memory(in_place_of(cell("llm-1.3b", "tp", tp, tp=tp), known))
    assert found.bytes_by_category["parameter"].likely == pytest.approx(4 * (128_064 + 20_000) / tp, rel=0.01)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_the_lower_bound_is_most_of_the_memory_without_activations(strategy, checkpointing):
    shipped = cell("llm-7b", strategy, 8, passes=8, precision="bf16", activation_checkpointing=checkpointing)
    bound, predicted = memory.predict_memory(in_place_of(shipped, equal_in_shape("llm-7b"))), memory.predict_memory(shipped)
    without = {name: span for name, span in predicted.bytes_by_category.items() if name not in ("activation", "temporary")}
    assert bound.total_bytes.low >= 0.85 * sum(span.low for span in without.values())


@pytest.mark.parametrize("strategy", menu.load_strategies())
def test_a_model_without_a_known_reason_is_not_left_out(strategy):
    """Llama-3-8B fits 8 A100 of 80 GiB under sharding; the planner does not know its activations and gives no verdict. With
    plain data parallelism, its parameters alone do not fit."""
    known = own_model((218_112_000,) * 32, 1_050_677_248)
    one = in_place_of(cell("llm-7b", strategy, 8, passes=8, precision="bf16", **mesh(strategy)), known)
    found = predict.predict_run(one, A100)
    whole = menu.find_strategy(strategy).cuts == () or "no-shard" in strategy or strategy in ("zero0", "zero1")
    if not whole and not mesh(strategy) and not menu.find_strategy(strategy).servers:
        assert (found.fits, predict.list_names_over_memory({one.name(): one}, {one.name(): found})) == (None, [])
    elif strategy in ("ddp", "single"):
        assert found.fits == "no"
    assert found.largest_micro_batch is None
    printed = planner_table.make_predictions_table({"cell": found}, {}).texts[0][2]
    assert printed == f"more than {planner_table.format_size(found.memory_bytes.low)}"


def test_a_model_of_70b_on_512_gpus_is_not_charged_as_a_whole():
    known = own_model((855_654_400,) * 80, 2_101_354_496)
    one = in_place_of(cell("llm-7b", "fsdp2", 512, nnodes=64, precision="bf16", activation_checkpointing="full"), known)
    found = predict.predict_run(one, A100)
    shards = 70.6e9 * 16 / 512
    assert found.fits is None
    assert shards < found.memory_bytes.low < found.memory_bytes.likely < 20 * GIB


def test_the_first_blocks_of_a_model_by_configuration_are_counted():
    known = own_model((10, 10, 30, 30), 7)
    one = in_place_of(cell("gpt2", "fsdp2", 2), known)
    facts = model_facts.find_model_facts(one)
    assert (facts.parameters, facts.block_count, facts.largest_block_parameters, facts.front_parameters) == (87, 4, 30, 7)
    two = model_facts.find_model_facts(msgspec.structs.replace(one, options={**one.options, "n_layer": 2}))
    assert (two.parameters, two.block_count, two.block_parameters, two.largest_block_parameters, two.flops_per_item) == (
        27,
        2,
        10,
        10,
        None,
    )
    staged = model_facts.find_model_facts(in_place_of(cell("gpt2", "pp-1f1b", 2, pp=2, passes=2), known))
    assert (staged.block_parameters, staged.front_parameters, staged.back_parameters) == (10, 0, 0)


def test_other_options_of_a_model_by_code_make_its_size_unknown():
    """The description is of the default options: with a width of 8 instead of 4096, the model may be much smaller."""
    known = own_model((10**9,) * 40, 0, file="/w/mine.py", options=(Option("width", 4096, "width"),))
    one = in_place_of(cell("llm-7b", "ddp", 8, precision="bf16"), known)
    assert predict.predict_run(one, A100).fits == "no"
    other = msgspec.structs.replace(one, options={**one.options, "width": 8})
    found = predict.predict_run(other, A100)
    assert (found.memory_bytes, found.fits, found.sent_bytes, found.step_s, exchanges.list_exchanges(other)) == (None,) * 5
    assert "the size of a model of the workspace is known only with its default options" in found.how


def test_a_data_set_with_other_classes_makes_the_head_of_an_image_classifier_unknown():
    data = Option("data", "synthetic", "data set", choices=("synthetic", "cifar10"))
    one = in_place_of(cell("gpt2", "ddp", 2), own_model((10, 10), 7, unit="images", options=(data,)))
    assert model_facts.find_model_facts(one).parameters == 27
    assert (
        model_facts.find_model_facts(msgspec.structs.replace(one, options={**one.options, "data": "cifar10"})).parameters == 20
    )


def test_descriptions_have_the_parameters_of_each_block(tmp_path):
    """A block of Llama: q and out of 64 x 64; k and v of 64 x 32; three layers of 64 x 96; two norms. A block that is used
    twice is counted once."""
    (known, _) = described(tmp_path / "json", model_of(tmp_path, "llama")).plugins
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert (known.block_parameters, known.parameters - 3 * block) == ((block,) * 3, 2 * 300 * 64 + 64)
    (known,) = described_code(tmp_path / "code", SHARED).plugins
    assert known.block_parameters == (4 * 4 + 4, 4 * 4 + 4, 0)


@pytest.fixture(scope="module")
def rehearse():
    process = Rehearser()
    yield process
    process.close()


ONE_PASS = "fsdp1-no-shard"  # torch refuses several passes in bf16
STRATEGIES = (ONE_PASS, "fsdp1-full-shard", "fsdp2", "zero3")
OTHERS = only_long(
    *("single", "ddp", "fsdp1-shard-grad-op", "fsdp1-hybrid-shard", "fsdp2-zero2", "fsdp2-hsdp"),
    *("tp", "tp-fsdp2", "zero1", "zero2"),
)


@pytest.mark.parametrize("name", ["llama", *only_long("gpt_neox")])
def test_a_rehearsal_never_needs_less_than_the_lower_bound(rehearse, tmp_path, name):
    """Many small blocks and few tokens: activations, buffers and gathered blocks are small, so they hide no error."""
    model = model_of(tmp_path, name, num_hidden_layers=12, vocab_size=64)
    known = described(tmp_path / "described", model).plugins[0]
    file = str(tmp_path / "described" / f"my-{name}" / known.file)
    known = msgspec.structs.replace(known, seq_len=2, file=file, counts=None)
    menu.add_own_workload(known, Path(file))
    for strategy in (*STRATEGIES, *OTHERS):
        for passes in (1,) if strategy == ONE_PASS else (2, *only_long(1)):
            keys = {"precision": "bf16", "activation_checkpointing": "full"}
            shipped = cell("llm-7b", strategy, 1 if strategy == "single" else 4, passes=passes, **mesh(strategy), **keys)
            one = in_place_of(shipped, known)
            answer, _ = rehearse(one, own=known)
            assert isinstance(answer, Rehearsed), answer.why
            assert memory.predict_memory(one, on_gpu=False).total_bytes.low <= answer.worst_rank.peak_bytes, (strategy, passes)


def test_a_model_without_blocks_is_rehearsed_above_its_lower_bound(rehearse, tmp_path):
    """FSDP gathers such a model as a whole; stage 3 of DeepSpeed gathers it layer by layer."""
    text = SHARED.replace("nn.Sequential(first, second, first)", "first, nn.Tanh(), second[0]")
    (known,) = described_code(tmp_path, text.replace("width: int = 4", "width: int = 512")).plugins
    known = msgspec.structs.replace(known, counts=None)
    menu.add_own_workload(known, Path(known.file))
    assert known.block_parameters == ()
    for strategy in ("fsdp2", "zero3"):
        one = cell_of(known, strategy, dp=2, micro_batch_size=1, global_batch_size=4, gradient_accumulation_steps=2)
        answer, _ = rehearse(one, own=known)
        assert isinstance(answer, Rehearsed), answer.why
        assert memory.predict_memory(one, on_gpu=False).total_bytes.low <= answer.worst_rank.peak_bytes, strategy
