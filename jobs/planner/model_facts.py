"""What the planner must know about a cell's model: its parameters by place, its operations, and what autograd saves.

For transformers, a formula gives what a block saves (Korthikanti et al., Reducing activation recomputation in large transformer
models, 2022, section 4.1). Dropout masks and the attention matrix are left out: shipped models have no dropout, and attention
never writes its matrix (Dao et al., 2022). The saved elements per token, where d is the width and i the width of the MLP:

    GPT-2, ViT   kept whole on tensor-parallel ranks: inputs of two norms 2d, inputs of the first layers of attention and MLP 2d
                 split over them: q, k, v 3d; input of the output layer d; before and behind GELU 8d
    LLaMA        kept whole: inputs of two norms 2d (always fp32), normed 2d, inputs of the first layers 2d
                 split: q, k, v 3d; input of the output layer d; the MLP's four tensors 4i

For convolutional networks, counted.yaml has the counted bytes. A workspace's own model has only its description.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import cast

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.plugins.plugin_kind import ModelCounts, SavedBytes
from shardlab.registry import OptionValue
from trainers import menu
from trainers.model import precision
from trainers.workload import Workload
from trainers.workload_options import Shape, read_shape
from trainers.workloads import gpt2, llama, vit


class ModelFacts(msgspec.Struct, frozen=True):
    """A model with the options of a cell."""

    parameters: int
    blocks: int
    block_parameters: int
    largest_block: int
    front: int
    """The number of parameters before the blocks."""
    back: int
    """The number of parameters behind the blocks."""
    tied: int
    """Number of parameters that are in both and count once."""
    flops_per_item: float | None
    """The FLOPs of forward and backward for one item; None: not known."""
    saved: SavedBytes | None
    kind: str
    """The kind of model: transformer, convolution or unknown."""
    how: str
    """How `saved` was obtained, in words for the user."""
    unaligned_flops_per_item: float = 0.0
    """The part of flops_per_item in matrix products with an unaligned dimension (ALIGNED)."""
    attention_flops_per_item: float | None = None
    """The part of flops_per_item in the products of attention that depend on two positions, queries with keys and weights with
    values, for all pairs of positions. None: not known."""
    head_flops_per_item: float | None = None
    """The part of flops_per_item outside of the blocks: of language models, the product that gives the logits. None: not
    known."""
    width: int | None = None
    """The size of the hidden state of a position between two blocks. None: not known, or the model is no transformer."""
    vocabulary_rows: int = 0
    """The rows of the embedding of tokens and of the head, if tensor-parallel ranks split them; else 0."""
    head_share: float = 1.0
    """The share of these rows on a tensor-parallel rank. If it is below 1, the fields front, back, tied and saved are those of
    one of the ranks; the FLOPs are those of the whole model."""
    is_causal: bool = False
    """Whether a position attends only to earlier positions, so that the kernel of attention skips half of the pairs."""


class CountedNetwork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of counted.yaml: a convolutional network as it was counted. The comments of that file explain the fields."""

    image_size: int
    fp32: int
    half: int
    blocks: int
    largest_block: int
    in_blocks: int


@functools.cache
def counted_networks() -> dict[str, CountedNetwork]:
    """The entries of counted.yaml, which are convolutional networks, by the name of the workload."""
    content = resources.files("jobs.planner").joinpath("counted.yaml").read_bytes()
    return msgspec.yaml.decode(content, type=dict[str, CountedNetwork])


# Tensor cores need rows of a multiple of 16 bytes. Matrix products in 16 bits are slow if a dimension is not a multiple of this
# number (device_profile.UNALIGNED).
ALIGNED = 8
TOKEN_BYTES = 8  # an item of n tokens is loaded with n + 1, because its targets are its inputs, one position later
_SHAPE_OPTIONS = ("n_layer", "n_embd", "n_head", "image_size", "gelu", "pad_vocabulary")
_facts_by_key: dict[tuple[object, ...], ModelFacts] = {}


def find_model_facts(cell: Cell) -> ModelFacts:
    """The facts of a cell's model. Computed once for all cells with the same model, because plans have thousands of cells."""
    options, is_own_model = cell.options, cell.workload_code is not None
    shape = (cell.pp > 1, *options.items()) if is_own_model else tuple(options.get(name) for name in _SHAPE_OPTIONS)
    key = (cell.workload, cell.workload_code, cell.seq_len, cell.precision, cell.tp, *shape)
    if (facts := _facts_by_key.get(key)) is None:
        facts = _facts_by_key[key] = _split_vocabulary(_compute_model_facts(cell), cell.tp)
    return facts


def _split_vocabulary(facts: ModelFacts, tp: int) -> ModelFacts:
    """The facts on one of the tensor-parallel ranks, if they split the embedding of tokens and the head."""
    if tp == 1 or not (rows := facts.vocabulary_rows):
        return facts
    rank_rows = -(-rows // tp)
    share, others = rank_rows / rows, (rows - rank_rows) * (facts.width or 0)  # others: the parameters of the other ranks
    unaligned_flops = (facts.head_flops_per_item or 0.0) if rank_rows % ALIGNED else 0.0
    facts = msgspec.structs.replace(facts, unaligned_flops_per_item=unaligned_flops, head_share=share)
    if facts.saved is None:  # `_described_facts` has divided what is outside of the blocks
        return facts
    saved = msgspec.structs.replace(
        facts.saved,
        head=facts.saved.head - facts.saved.logits * (1 - share),
        logits=facts.saved.logits * share,
        head_weights=facts.saved.head_weights * share,
    )
    return msgspec.structs.replace(
        facts,
        front=facts.front - others,
        back=facts.back - others,
        tied=facts.tied and facts.tied - others,
        saved=saved,
    )


def _compute_model_facts(cell: Cell) -> ModelFacts:
    workload = menu.find_workload_of_cell(cell)
    if workload.file is not None:
        return _described_facts(cell, workload)
    family = workload.task.rpartition(".")[2]
    if (formula := {"gpt2": _gpt2_facts, "llama": _llama_facts, "vit": _vit_facts}.get(family)) is not None:
        return formula(cell, workload)
    return _convolutional_facts(cell, workload) if cell.workload in counted_networks() else _described_facts(cell, workload)


def _gpt2_facts(cell: Cell, workload: Workload) -> ModelFacts:
    shape, tokens = read_shape(cell), cast("int", cell.seq_len)
    settings, multiple = workload.settings, cast("int", cell.options.get("pad_vocabulary", 1))
    table_rows = -(-settings["vocabulary"] // multiple) * multiple
    positions = max(settings["positions"], tokens)
    unpadded = gpt2.count_parameters(shape, settings["vocabulary"], positions)
    parameters = unpadded + (table_rows - settings["vocabulary"]) * shape.width
    unfused = 12 * shape.width if cell.options.get("gelu") == "unfused" else 0
    return ModelFacts(
        parameters=parameters,
        blocks=shape.layer_count,
        block_parameters=(block := 12 * shape.width**2 + 13 * shape.width),
        largest_block=block,
        front=(table_rows + positions) * shape.width,
        back=table_rows * shape.width + 2 * shape.width,
        tied=table_rows * shape.width,
        flops_per_item=tokens * gpt2.count_flops_per_token(parameters, shape, tokens),
        saved=_count_saved_bytes(
            cell, shape, tokens, extra_elements=unfused, logits=tokens * table_rows, head_parameters=table_rows * shape.width
        ),
        kind="transformer",
        how=FORMULA,
        unaligned_flops_per_item=6.0 * table_rows * shape.width * tokens if table_rows % ALIGNED else 0.0,
        attention_flops_per_item=12.0 * shape.layer_count * shape.width * tokens**2,
        head_flops_per_item=6.0 * table_rows * shape.width * tokens,
        vocabulary_rows=table_rows,
        width=shape.width,
        is_causal=True,
    )


FORMULA = "saved activations by formula (Korthikanti et al., 2022)"


def _vit_facts(cell: Cell, workload: Workload) -> ModelFacts:
    shape, patch, classes = read_shape(cell), workload.settings["patch"], workload.settings["classes"]
    size = cast("int", cell.options["image_size"])
    tokens = (size // patch) ** 2 + 1
    width = shape.width
    block = 12 * width**2 + 13 * width
    front = vit.CHANNELS * patch**2 * width + width + (tokens + 1) * width  # patches, class token, positions
    back = 2 * width + width * classes + classes
    saved = _count_saved_bytes(
        cell,
        shape,
        tokens,
        extra_elements=0,
        logits=classes,
        head_parameters=(vit.CHANNELS * patch**2 + classes) * width,
        inputs=4,
    )
    inputs, cast_bytes = _count_image_bytes(cell, size)
    return ModelFacts(
        parameters=shape.layer_count * block + front + back,
        blocks=shape.layer_count,
        block_parameters=block,
        largest_block=block,
        front=front,
        back=back,
        tied=0,
        flops_per_item=vit.count_flops_per_image(shape, size, patch, classes),
        saved=msgspec.structs.replace(saved, head=saved.head + cast_bytes, inputs=inputs),
        kind="transformer",
        how=FORMULA,
        attention_flops_per_item=12.0 * shape.layer_count * width * tokens**2,
        # the projection of patches, whose pixels need no gradient, and the classifier
        head_flops_per_item=4.0 * vit.CHANNELS * patch**2 * width * (tokens - 1) + 6.0 * width * classes,
        width=width,
    )


def _count_image_bytes(cell: Cell, size: int) -> tuple[float, float]:
    """The bytes of an image of size x size pixels with its label, as they are loaded, and of its copy in 16 bits, if any."""
    pixels = vit.CHANNELS * size**2
    return 4.0 * pixels + 8.0, 0.0 if precision.computed_bytes(cell.precision) == 4 else 2.0 * pixels


def _count_saved_bytes(
    cell: Cell, shape: Shape, tokens: int, *, extra_elements: int, logits: int, head_parameters: int, inputs: int = 2
) -> SavedBytes:
    """What a model of GPT-2 or ViT saves for backward.

    extra_elements: the number of further elements per token that a block saves and that tensor-parallel ranks split.
    head_parameters: parameters of matrices outside of blocks. inputs: the number of layers of a block that read a normed hidden
    state. Each of them casts it under autocast.
    """
    computed, stream = precision.computed_bytes(cell.precision), precision.stream_bytes(cell.precision)
    width = shape.width
    autocast = cell.precision in precision.AUTOCAST
    gathered = tokens * (inputs if autocast else 2) * width * computed
    return SavedBytes(
        # 4 * stream: each of the two norms saves two numbers per token
        block_whole=tokens * (2 * width * stream + 4 * stream) + gathered,
        # 4 * heads: attention saves a sum in fp32 for each head
        block_split=tokens * ((12 * width + extra_elements) * computed + 4 * shape.head_count),
        block_input=tokens * width * stream,
        head=tokens * width * (stream + computed) + logits * computed,
        logits=logits * computed,
        weights=12 * width**2 * computed if autocast else 0,
        head_weights=head_parameters * computed if autocast else 0,
        inputs=TOKEN_BYTES * (tokens + 1),
        block_gathered=gathered,
    )


def _llama_facts(cell: Cell, workload: Workload) -> ModelFacts:
    shape, tokens, vocabulary = read_shape(cell), cast("int", cell.seq_len), workload.settings["vocabulary"]
    computed, stream = precision.computed_bytes(cell.precision), precision.stream_bytes(cell.precision)
    width, inner_width = shape.width, llama.compute_inner_width(shape.width)
    parameters = llama.count_parameters(shape, vocabulary)
    block = 4 * width**2 + 3 * width * inner_width + 2 * width
    autocast = cell.precision in precision.AUTOCAST
    # under autocast, each of the five layers that read a normed hidden state casts it
    gathered = tokens * (5 if autocast else 2) * width * computed
    return ModelFacts(
        parameters=parameters,
        blocks=shape.layer_count,
        block_parameters=block,
        largest_block=block,
        front=vocabulary * width,
        back=vocabulary * width + width,
        tied=0,
        flops_per_item=tokens * llama.count_flops_per_token(parameters, shape, vocabulary, tokens),
        saved=SavedBytes(
            block_whole=tokens * (2 * width * 4 + 8 + 2 * width * stream) + gathered,
            block_split=tokens * (4 * width * computed + 4 * inner_width * computed + 4 * shape.head_count),
            block_input=tokens * width * stream,
            head=tokens * width * (4 + stream + computed) + tokens * vocabulary * computed,
            logits=tokens * vocabulary * computed,
            weights=(4 * width**2 + 3 * width * inner_width) * computed if autocast else 0,
            head_weights=vocabulary * width * computed if autocast else 0,
            inputs=TOKEN_BYTES * (tokens + 1),
            block_gathered=gathered,
        ),
        kind="transformer",
        how=FORMULA,
        attention_flops_per_item=12.0 * shape.layer_count * width * tokens**2,
        head_flops_per_item=6.0 * vocabulary * width * tokens,
        vocabulary_rows=vocabulary,
        width=width,
        is_causal=True,
    )


# a factor: autocast keeps some tensors of convolutional networks in fp32; counted for convnext-large-tiny: 1.055
AUTOCAST_COPIES = 1.1


def _convolutional_facts(cell: Cell, workload: Workload) -> ModelFacts:
    network = counted_networks()[cell.workload]
    size = cast("int", cell.options["image_size"])
    pixels = (size / network.image_size) ** 2
    inputs, cast_bytes = _count_image_bytes(cell, size)
    # without a cast, the first layer saves the batch itself, which counts as `inputs`
    bytes_per_image = network.half * pixels if cast_bytes else network.fp32 * pixels - inputs
    bytes_per_image *= AUTOCAST_COPIES if cell.precision in precision.AUTOCAST else 1
    outside_parameters = workload.parameters - network.in_blocks
    flops = None if workload.flops_per_unit is None else workload.flops_per_unit * pixels
    return ModelFacts(
        parameters=workload.parameters,
        blocks=network.blocks,
        block_parameters=network.in_blocks // network.blocks,
        largest_block=network.largest_block,
        front=outside_parameters,
        back=0,
        tied=0,
        flops_per_item=flops,
        saved=SavedBytes(
            bytes_per_image / network.blocks,
            0.0,
            bytes_per_image / network.blocks,
            0.0,
            0.0,
            inputs=inputs,
        ),
        kind="convolution",
        how=f"saved activations counted at {network.image_size} pixels",
        attention_flops_per_item=0.0,
    )


SAVED_PER_ITEM = ("block_whole", "block_split", "block_input", "head", "logits", "inputs")
COUNTED_AS: dict[str, str] = {"tf32": "fp32", "fp16": "bf16", "bf16-pure": "bf16", "fp16-autocast": "bf16-autocast"}
LAYERS = "n_layer"  # the option of a model by configuration that keeps only the first blocks


def are_facts_known(cell: Cell) -> bool:
    """Whether the facts of a cell's model are known. The description of a workspace's own model is valid for its default
    options; of a model by configuration, the first blocks are known too."""
    workload = menu.find_workload_of_cell(cell)
    if workload.file is None or workload.has_default_options(cell):
        return True
    default = _find_default(workload, LAYERS)
    return workload.is_data and default in (cell.options.get(LAYERS), len(workload.block_parameters))


def _find_default(workload: Workload, name: str) -> OptionValue:
    return next((option.default for option in workload.options if option.name == name), None)


def _described_facts(cell: Cell, workload: Workload) -> ModelFacts:
    """The facts of a workspace's own model by its description. What is not known is left out: without the saved activations,
    the memory of this model is a lower bound."""
    counts, all_sizes, layers = workload.counts, workload.block_parameters, _find_default(workload, LAYERS)
    sizes = (
        all_sizes if layers is None else all_sizes[: len(all_sizes) - cast("int", layers) + cast("int", cell.options[LAYERS])]
    )
    has_equal_blocks, length = len(set(all_sizes)) <= 1, _find_length(cell, workload)
    changed = {option.name for option in workload.options if cell.options.get(option.name) != option.default}
    has_other_head = workload.unit == "images" and "data" in changed  # the data set may have another number of classes
    outside = 0 if has_other_head else workload.parameters - sum(all_sizes)
    facts = ModelFacts(
        parameters=sum(sizes) + outside,
        blocks=len(sizes),
        # which stage of a pipeline has which blocks is known if they are equal
        block_parameters=0 if not sizes else min(sizes) if cell.pp > 1 else sum(sizes) // len(sizes),
        largest_block=max(sizes, default=0),
        # a lower bound: tensor-parallel ranks may split what is outside of the blocks of a model by configuration
        front=0 if cell.pp > 1 else outside // cell.tp if workload.is_data else outside,
        back=0,
        tied=0,
        flops_per_item=None
        if changed or not workload.flops_per_unit or length != 1
        else workload.flops_per_unit * (cell.seq_len or 1),
        saved=None,
        kind="unknown",
        how="activations are not known, so memory is a lower bound",
    )
    if counts is None or (len(sizes) < len(all_sizes) and not has_equal_blocks):
        return facts
    share = len(sizes) / len(all_sizes) if all_sizes else 1.0
    attention_flops, head_flops = share * counts.attention_flops * length**2, counts.other_flops * length
    block_flops = share * max(0.0, counts.block_flops - counts.attention_flops) * length + attention_flops
    facts = msgspec.structs.replace(
        facts,
        flops_per_item=block_flops + head_flops or None,
        kind=counts.kind,
        unaligned_flops_per_item=head_flops if counts.vocabulary % ALIGNED else 0.0,
        attention_flops_per_item=attention_flops,
        head_flops_per_item=head_flops,
        width=counts.width,
        vocabulary_rows=counts.vocabulary if counts.splits_vocabulary else 0,
        is_causal=counts.is_causal,
    )
    saved = counts.saved.get(COUNTED_AS.get(cell.precision, cell.precision))
    if saved is None or has_other_head or "dropout" in changed or (cell.pp > 1 and not has_equal_blocks):
        return facts
    front, back, tied = counts.end_parameters
    saved = _scale_saved_bytes(saved, length)
    saved = msgspec.structs.replace(saved, block_gathered=min(_count_gathered_bytes(cell, counts), saved.block_whole))
    return msgspec.structs.replace(
        facts,
        block_parameters=sum(sizes) // max(1, len(sizes)),
        front=front,
        back=back,
        tied=tied,
        saved=saved,
        how="saved activations counted in the model",
    )


def _count_gathered_bytes(cell: Cell, counts: ModelCounts) -> float:
    """What sequence parallelism gathers in a block, in bytes per item: the hidden states that the pairs of split layers read.
    Under autocast, each layer that is split by columns has a copy."""
    if counts.reductions is None or counts.width is None:
        return 0.0
    rows, columns = counts.reductions
    inputs = columns if cell.precision in precision.AUTOCAST else rows
    return float(inputs * (cell.seq_len or 0) * counts.width * precision.computed_bytes(cell.precision))


def _find_length(cell: Cell, workload: Workload) -> float:
    """The size of an item of a cell, in tokens or pixels, divided by its size with the workload's default options."""
    if cell.seq_len is not None and workload.seq_len is not None:
        return cell.seq_len / workload.seq_len
    size, default = cell.options.get("image_size"), _find_default(workload, "image_size")
    return (size / default) ** 2 if isinstance(size, int) and isinstance(default, int) else 1.0


def _scale_saved_bytes(saved: SavedBytes, length: float) -> SavedBytes:
    """What is saved of an item that is `length` times as long."""
    scaled = {name: getattr(saved, name) * length for name in SAVED_PER_ITEM}
    scaled["block_whole"] = max(0.0, scaled["block_whole"] + saved.block_squared * (length**2 - length))
    return msgspec.structs.replace(saved, **scaled)
