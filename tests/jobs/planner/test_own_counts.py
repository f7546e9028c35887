"""A model of the workspace is predicted like a shipped model: what its description counted in it is compared with the formulas
of shipped models of the same shape, with rehearsals, with published measurements, and with numbers by hand."""

import functools
import json
import tempfile
from pathlib import Path

import msgspec
import pytest
from support_configured import described, write
from support_long import only_long
from support_own import cell_of
from support_own import described as described_code
from support_planner import cell
from support_rehearsal import Rehearser

from jobs.planner import exchanges, gpu, link, memory, model_facts, predict, step_time
from jobs.planner.machine import PlannedMachine
from shardlab.matrix.model_file import ModelByConfiguration, read_model
from shardlab.plugins.plugin_kind import OwnWorkload
from shardlab.runs.prediction import make_exact_range
from shardlab.runs.rehearsed import Rehearsed
from trainers import menu

GIB = 1 << 30


def machine(name, memory_gib):
    return PlannedMachine(
        True,
        name,
        gpu.must_find_gpu_model(name),
        make_exact_range(memory_gib * GIB),
        link.make_data_sheet_link(gpu.must_find_gpu_model(name)),
    )


A100, H100 = machine("a100-80gb", 80), machine("h100-80gb-hbm3", 80)


def gpt2(layers, width, heads, activation="gelu_pytorch_tanh"):
    return "gpt2", 1024, {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": 50_257, "n_positions": 1024, "n_layer": layers, "n_embd": width,
        "n_head": heads, "activation_function": activation,
    }  # fmt: skip


def llama(layers, width, heads, inner, *, vocabulary=32_000, groups=None, seq_len=2048):
    return "llama", seq_len, {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups or heads,
        "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    }  # fmt: skip


VIT = {
    "architectures": ["ViTForImageClassification"], "image_size": 224, "patch_size": 32, "num_labels": 1000, "hidden_size": 768,
    "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
}  # fmt: skip
SHAPES = {
    "gpt2": gpt2(12, 768, 12),
    "llm-1.3b": llama(24, 2048, 16, 5504),
    "vit-b-32": ("vit", None, VIT),
    **dict(only_long(("gpt2-large", gpt2(36, 1280, 20)), ("llm-7b", llama(32, 4096, 32, 11_008)))),
}
LLAMA_8B = llama(32, 4096, 32, 14_336, vocabulary=128_256, groups=8, seq_len=8192)
LLAMA_70B = llama(80, 8192, 64, 28_672, vocabulary=128_256, groups=8, seq_len=8192)
SMALL = {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 32, "intermediate_size": 256, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "architectures": ["Qwen3MoeForCausalLM"]}


@functools.cache
def describe_text(model_type, seq_len, text):
    folder = Path(tempfile.mkdtemp())
    file = write(folder, model_type, **json.loads(text))
    model = read_model(ModelByConfiguration(transformers=file, seq_len=seq_len), folder)
    found = described(folder / "described", model)
    assert not found.fault, found.fault
    known = found.plugins[0]
    return msgspec.structs.replace(known, file=str(folder / "described" / model.name / known.file))


def describe(model_type, seq_len, content):
    """Describe a model by its configuration, once for all tests. Returns the description with the path of its file."""
    return describe_text(model_type, seq_len, json.dumps(content))


def own_cell(shipped, known, *, layers=None, **keys):
    """A cell like `shipped` that trains the model `known`, or its first `layers` blocks."""
    menu.add_own_workload(known, Path(known.file))
    options = {option.name: option.default for option in (*menu.find_strategy(shipped.strategy).options, *known.options)}
    kept = {name: value for name, value in shipped.options.items() if name in options and name != "n_layer"}
    if kept.get("dropout", True) is None:  # GPT-2's default; that of a configuration is false
        del kept["dropout"]
    kept |= {} if layers is None else {"n_layer": layers}
    own = {"workload": known.name, "workload_code": known.code, "seq_len": known.seq_len, "options": options | kept}
    return msgspec.structs.replace(shipped, **{**own, **keys})


def list_cells(workload, tensor_degrees):
    """Cells of a shipped workload for each strategy, precision and checkpointing that its twin by configuration can have."""
    for strategy, entry in menu.load_strategies().items():
        if "pp" in entry.degrees or entry.servers or ("tp" in entry.degrees and not tensor_degrees):
            continue
        degrees = {degree: 2 for degree in entry.degrees if degree != "dp"}
        for precision in ("fp32", "bf16", "bf16-autocast"):
            for passes, checkpointing in ((1, "none"), (1, "full"), (8, "every-2")):
                keys = {"precision": precision, "activation_checkpointing": checkpointing, **degrees}
                gpus = 1 if strategy == "single" else 8
                one = cell(workload, strategy, gpus, micro=4, passes=passes, **keys)
                if menu.refuse(one) is None:
                    yield one
                    if "tp" in entry.degrees and one.seq_len is not None:
                        yield msgspec.structs.replace(one, options={**one.options, "sequence_parallel": True})


@pytest.mark.parametrize("workload", SHAPES)
def test_a_configuration_of_the_shape_of_a_shipped_model_is_predicted_like_it(workload):
    known = describe(*SHAPES[workload])
    cells = list(list_cells(workload, known.tensor_degrees))
    assert len(cells) > 60
    for one in cells:
        shipped, own = predict.predict_run(one, A100), predict.predict_run(own_cell(one, known), A100)
        assert (own.fits, own.sent_from) == (shipped.fits, shipped.sent_from), one
        assert own.memory_by_category.keys() == shipped.memory_by_category.keys(), one
        for name, expected in shipped.memory_by_category.items():
            assert own.memory_by_category[name].likely == pytest.approx(expected.likely, rel=0.03), (one, name)
        assert own.memory_bytes.likely == pytest.approx(shipped.memory_bytes.likely, rel=0.03), one
        if shipped.step_s is not None:
            for edge in ("low", "likely", "high"):
                assert getattr(own.step_s, edge) == pytest.approx(getattr(shipped.step_s, edge), rel=0.03), one


def test_the_gelu_of_transformers_gpt2_is_counted_as_eight_operators():
    known, one = describe(*gpt2(12, 768, 12, "gelu_new")), cell("gpt2", "ddp", 8, micro=4, options={"gelu": "unfused"})
    shipped, own = memory.predict_memory(one), memory.predict_memory(own_cell(one, known))
    assert own.total_bytes.likely == pytest.approx(shipped.total_bytes.likely, rel=0.001)


@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
def test_other_lengths_and_fewer_blocks_follow_from_the_counts(precision):
    known = describe(*SHAPES["gpt2"])
    for seq_len, layers in ((256, 12), (512, 5)):
        one = cell("gpt2", "ddp", 8, micro=8, precision=precision, seq_len=seq_len, options={"n_layer": layers})
        own = own_cell(one, known, seq_len=seq_len, layers=layers)
        shipped_facts, facts = model_facts.find_model_facts(one), model_facts.find_model_facts(own)
        for name in ("parameters", "block_count", "flops_per_item", "attention_flops_per_item", "head_flops_per_item", "width"):
            assert getattr(facts, name) == pytest.approx(getattr(shipped_facts, name), rel=0.015), name
        shipped, found = predict.predict_run(one, A100), predict.predict_run(own, A100)
        assert found.memory_bytes.likely == pytest.approx(shipped.memory_bytes.likely, rel=0.03)
        assert found.step_s.likely == pytest.approx(shipped.step_s.likely, rel=0.03)


@pytest.mark.parametrize("gpus", [64, 512])
def test_llama_70b_fits_64_and_512_h100(gpus):
    """Weights, gradients and the state of Adam are 16 bytes per parameter over all GPUs; each of 80 blocks keeps its input, a
    hidden state of 8192 x 8192 numbers in bf16: 10 GiB. Two gathered blocks, the embedding, the head and the logits are less
    than 25 GiB."""
    one = cell("llm-7b", "fsdp2", gpus, nnodes=gpus // 8, precision="bf16", activation_checkpointing="full")
    found = predict.predict_run(own_cell(one, describe(*LLAMA_70B)), H100)
    states, inputs = 16 * 70_553_706_496 / gpus, 80 * 8192 * 8192 * 2
    assert states + inputs < found.memory_bytes.likely < states + inputs + 25 * GIB
    assert found.fits in ("yes", "likely")
    assert found.step_s is None  # the link between nodes is not known


@pytest.mark.parametrize(("gpus", "published_gib"), [(8, 82.4), (128, 67.0)])
def test_the_memory_of_llama_8b_is_that_which_torchtitan_published(gpus, published_gib):
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: the memory that torch reserved, with FSDP2, two sequences of
    8192 tokens per GPU, and the activations of every second operator recomputed."""
    one = cell("llm-7b", "fsdp2", gpus, micro=2, precision="bf16", activation_checkpointing="every-2")
    found = memory.predict_memory(own_cell(one, describe(*LLAMA_8B)))
    assert (found.tensor_bytes + found.bytes_by_category["fragmentation"]).likely / GIB == pytest.approx(
        published_gib, rel=0.12
    )


def test_experts_count_in_the_time_if_active_and_always_in_the_memory():
    known = describe("qwen3_moe", 64, {**SMALL, **EXPERTS, "tie_word_embeddings": False})
    width, layers, heads, groups, head_width, inner = 128, 4, 4, 2, 32, 64
    attention = 2 * width * heads * head_width + 2 * width * groups * head_width
    router, expert, head = width * 8, 3 * width * inner, 2000 * width
    active = layers * (attention + router + 2 * expert) + head
    assert known.flops_per_unit == 6 * active + 12 * layers * heads * head_width * 64
    norms = layers * (2 * width + 2 * head_width) + width
    assert known.parameters == active + layers * 6 * expert + head + norms
    one = own_cell(cell("llm-7b", "ddp", 8, precision="bf16"), known)
    facts = model_facts.find_model_facts(one)
    assert (facts.model_kind, facts.parameters, facts.flops_per_item) == (
        "transformer",
        known.parameters,
        64 * known.flops_per_unit,
    )
    assert step_time.predict_step_time(one, A100) is not None


@pytest.fixture(scope="module")
def rehearse():
    process = Rehearser()
    yield process
    process.close()


UNLIKE_SHIPPED = {  # tensors that no shipped model saves
    "qwen3_moe": EXPERTS,  # experts and normed heads
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32},  # two kinds of blocks with masks
    **dict(only_long(
        ("gpt_oss", {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4}),  # the matrix of attention
        ("gpt_neox", {"architectures": ["GPTNeoXForCausalLM"]}),  # attention and MLP in parallel
    )),
}  # fmt: skip


@pytest.mark.parametrize("model_type", UNLIKE_SHIPPED)
def test_counts_give_what_a_rehearsal_needs(rehearse, model_type):
    known = describe(model_type, 256, {**SMALL, **UNLIKE_SHIPPED[model_type]})
    one = own_cell(cell("llm-7b", "single", micro=8, precision="bf16"), known)
    answer, _ = rehearse(one, own=known)
    assert isinstance(answer, Rehearsed), answer.why
    assert memory.predict_memory(one, on_gpu=False).total_bytes.likely == pytest.approx(answer.worst_rank.peak_bytes, rel=0.02)


BY_CODE = """\
"A residual network."
import torch
from torch import nn
ITEMS, UNIT, UNITS_PER_ITEM = 8, "points", 4
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))
def model(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.Sequential(*(Block(width) for _ in range(4))), nn.Linear(width, 5))
def batch(items):
    return torch.ones(len(items), 16), items % 5
def tensor_parallel(block, ranks):
    return {"up": "columns", "down": "rows"}
def pipeline(model):
    return model[0], model[2]
"""


def test_a_model_by_code_is_known_by_place(tmp_path):
    (known,) = described_code(tmp_path, BY_CODE).plugins
    menu.add_own_workload(known, Path(known.file))
    assert known.counts.end_parameters == (16 * 64 + 64, 64 * 5 + 5, 0)
    assert known.counts.reductions == (1, 1)
    one = cell_of(known, "pp-1f1b", pp=2, micro_batch_size=4, global_batch_size=16, gradient_accumulation_steps=4)
    facts = model_facts.find_model_facts(one)
    assert (facts.front_parameters, facts.back_parameters, facts.block_parameters) == (
        1088,
        325,
        2 * 64 + 2 * 4 * 64 * 64 + 5 * 64,
    )
    # of each item of 64 numbers in fp32: the block's input, two numbers of the norm, what the norm writes, and behind the ReLU
    saved = facts.saved_bytes
    assert saved.block_whole + saved.block_split == 4 * (64 + 2 + 64 + 256)
    assert (saved.block_input, saved.logits) == (4 * 64, 4 * 5)
    # matrix products in forward and backward, but no gradient of the inputs
    assert facts.flops_per_item == 4 * 16 * 64 + 6 * 4 * (2 * 4 * 64 * 64) + 6 * 64 * 5
    assert memory.predict_memory(one).is_complete
    assert sum(term.payload_bytes for term in exchanges.list_exchanges(one) if term.op == "send") == 4 * (4 * 64 * 4)
    split = cell_of(known, "tp", tp=2, gradient_accumulation_steps=1)
    assert model_facts.find_model_facts(split).saved_bytes.block_split == pytest.approx(4 * 256)  # behind the ReLU
    assert [term.calls for term in exchanges.list_exchanges(split)] == [4, 4]


def test_operations_that_the_file_gives_are_those_of_all_units_of_an_item(tmp_path):
    (known,) = described_code(tmp_path, BY_CODE + "FLOPS_PER_UNIT = 1e6\n").plugins
    menu.add_own_workload(known, Path(known.file))
    assert model_facts.find_model_facts(cell_of(known, "ddp", dp=2)).flops_per_item == pytest.approx(4e6)


def test_a_changed_model_has_a_lower_bound_of_memory(tmp_path):
    """The head has an output per class of the data set, and dropout saves masks."""
    known = describe("vit", None, {**VIT, "hidden_dropout_prob": 0.1})
    for option, value in (("data", "cifar10"), ("dropout", True)):
        one = own_cell(cell("vit-b-32", "ddp", 2, options={option: value}), known)
        assert not memory.predict_memory(one).is_complete, option
        assert model_facts.find_model_facts(one).flops_per_item is not None
    assert memory.predict_memory(own_cell(cell("vit-b-32", "ddp", 2, options={"subset": 100}), known)).is_complete


def test_counts_are_decoded_within_bounds():
    known = describe(*SHAPES["gpt2"])
    text = msgspec.json.encode(known)
    assert msgspec.json.decode(text, type=OwnWorkload) == known
    for changed in (
        {"block_flops": -1},
        {"vocabulary": 1e300},
        {"end_parameters": [1, 2]},
        {"saved": {"fp32": {"block_whole": -1}}},
    ):
        content = msgspec.json.decode(text)
        content["counts"] |= changed
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(content, OwnWorkload)
