"""What the planner must know about a cell's model: its parameters by place, its operations, and what autograd saves.

For transformers, a formula gives what a block saves (Korthikanti et al., Reducing activation recomputation in large transformer
models, 2022, section 4.1). With dropout, a block also saves two masks of d bytes. The attention matrix is left out, because
attention never writes it (Dao et al., 2022). The saved elements per token, where d is the width and i the width of the MLP:

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
from trainers.workload_options import ImageOptions, Shape, read_shape
from trainers.workloads import gpt2, llama, vit


class ModelFacts(msgspec.Struct, frozen=True):
    """A model with the options of a cell."""

    parameters: int
    block_count: int
    block_parameters: int
    largest_block_parameters: int
    front_parameters: int
    """The number of parameters before the blocks."""
    back_parameters: int
    """The number of parameters behind the blocks."""
    tied_parameters: int
    """Number of parameters that are in both and count once."""
    flops_per_item: float | None
    """The FLOPs of forward and backward for one item; None: not known."""
    saved_bytes: SavedBytes | None
    model_kind: str
    """The kind of model: transformer, convolution or unknown."""
    saved_bytes_source: str
    """How `saved` was obtained, in words for the user."""
    unaligned_flops_per_item: float = 0.0
    """The part of flops_per_item in matrix products with an unaligned dimension (ALIGNED_MULTIPLE)."""
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
def read_counted_networks() -> dict[str, CountedNetwork]:
    """The entries of counted.yaml, which are convolutional networks, by the name of the workload."""
    yaml_bytes = resources.files("jobs.planner").joinpath("counted.yaml").read_bytes()
    return msgspec.yaml.decode(yaml_bytes, type=dict[str, CountedNetwork])


# Tensor cores need rows of a multiple of 16 bytes. Matrix products in 16 bits are slow if a dimension is not a multiple of this
# number (device_profile.UNALIGNED_SHARE).
ALIGNED_MULTIPLE = 8
TOKEN_BYTES = 8  # an item of n tokens is loaded with n + 1, because its targets are its inputs, one position later
_SHAPE_OPTIONS = ("n_layer", "n_embd", "n_head", "image_size", "gelu", "pad_vocabulary", "dropout")
_facts_by_key: dict[tuple[object, ...], ModelFacts] = {}


def find_model_facts(cell: Cell) -> ModelFacts:
    """The facts of a cell's model. Computed once for all cells with the same model, because plans have thousands of cells."""
    options, is_own_model = cell.options, cell.workload_code is not None
    shape_values = (
        (cell.pp > 1, *options.items()) if is_own_model else tuple(options.get(option_name) for option_name in _SHAPE_OPTIONS)
    )
    facts_key = (cell.workload, cell.workload_code, cell.seq_len, cell.precision, cell.tp, *shape_values)
    if (facts := _facts_by_key.get(facts_key)) is None:
        facts = _facts_by_key[facts_key] = _split_vocabulary(_compute_model_facts(cell), cell.tp)
    return facts


def _split_vocabulary(facts: ModelFacts, tp: int) -> ModelFacts:
    """The facts on one of the tensor-parallel ranks, if they split the embedding of tokens and the head."""
    if tp == 1 or not (vocabulary_rows := facts.vocabulary_rows):
        return facts
    rank_rows = -(-vocabulary_rows // tp)
    # others: the parameters of the other ranks
    rows_share, other_parameters = (rank_rows / vocabulary_rows, (vocabulary_rows - rank_rows) * (facts.width or 0))
    unaligned_flops = (facts.head_flops_per_item or 0.0) if rank_rows % ALIGNED_MULTIPLE else 0.0
    facts = msgspec.structs.replace(facts, unaligned_flops_per_item=unaligned_flops, head_share=rows_share)
    if facts.saved_bytes is None:  # `_compute_described_facts` has divided what is outside of the blocks
        return facts
    saved = msgspec.structs.replace(
        facts.saved_bytes,
        head=facts.saved_bytes.head - facts.saved_bytes.logits * (1 - rows_share),
        logits=facts.saved_bytes.logits * rows_share,
        head_weights=facts.saved_bytes.head_weights * rows_share,
    )
    return msgspec.structs.replace(
        facts,
        front_parameters=facts.front_parameters - other_parameters,
        back_parameters=facts.back_parameters - other_parameters,
        tied_parameters=facts.tied_parameters and facts.tied_parameters - other_parameters,
        saved_bytes=saved,
    )


def _compute_model_facts(cell: Cell) -> ModelFacts:
    workload = menu.find_workload_of_cell(cell)
    if workload.file is not None:
        return _compute_described_facts(cell, workload)
    model_family = workload.task.rpartition(".")[2]
    compute_facts = {"gpt2": _compute_gpt2_facts, "llama": _compute_llama_facts, "vit": _compute_vit_facts}.get(model_family)
    if compute_facts is not None:
        return compute_facts(cell, workload)
    if cell.workload in read_counted_networks():
        return _compute_convolutional_facts(cell, workload)
    return _compute_described_facts(cell, workload)


def _compute_gpt2_facts(cell: Cell, workload: Workload) -> ModelFacts:
    model_shape, token_count = read_shape(cell), cast("int", cell.seq_len)
    settings, options = workload.settings, gpt2.Gpt2Options(cell.options)
    table_rows = -(-settings["vocabulary"] // options.pad_vocabulary) * options.pad_vocabulary
    position_count = max(settings["positions"], token_count)
    unpadded_parameters = gpt2.count_parameters(model_shape, settings["vocabulary"], position_count)
    parameters = unpadded_parameters + (table_rows - settings["vocabulary"]) * model_shape.width
    unfused_elements = 12 * model_shape.width if options.gelu == "unfused" else 0
    return ModelFacts(
        parameters=parameters,
        block_count=model_shape.layer_count,
        block_parameters=(parameters_of_block := 12 * model_shape.width**2 + 13 * model_shape.width),
        largest_block_parameters=parameters_of_block,
        front_parameters=(table_rows + position_count) * model_shape.width,
        back_parameters=table_rows * model_shape.width + 2 * model_shape.width,
        tied_parameters=table_rows * model_shape.width,
        flops_per_item=token_count * gpt2.count_flops_per_token(parameters, model_shape, token_count),
        saved_bytes=_count_saved_bytes(
            cell,
            model_shape,
            token_count,
            extra_elements=unfused_elements,
            logit_count=token_count * table_rows,
            head_parameters=table_rows * model_shape.width,
        ),
        model_kind="transformer",
        saved_bytes_source=FORMULA_SOURCE,
        unaligned_flops_per_item=6.0 * table_rows * model_shape.width * token_count if table_rows % ALIGNED_MULTIPLE else 0.0,
        attention_flops_per_item=12.0 * model_shape.layer_count * model_shape.width * token_count**2,
        head_flops_per_item=6.0 * table_rows * model_shape.width * token_count,
        vocabulary_rows=table_rows,
        width=model_shape.width,
        is_causal=True,
    )


FORMULA_SOURCE = "saved activations by formula (Korthikanti et al., 2022)"


def _compute_vit_facts(cell: Cell, workload: Workload) -> ModelFacts:
    model_shape, patch_size, class_count = read_shape(cell), workload.settings["patch"], workload.settings["classes"]
    image_size = ImageOptions(cell.options).image_size
    token_count = (image_size // patch_size) ** 2 + 1
    width = model_shape.width
    block_parameters = 12 * width**2 + 13 * width
    # patches, class token, positions
    front_parameters = vit.CHANNELS * patch_size**2 * width + width + (token_count + 1) * width
    back_parameters = 2 * width + width * class_count + class_count
    saved_bytes = _count_saved_bytes(
        cell,
        model_shape,
        token_count,
        extra_elements=0,
        logit_count=class_count,
        head_parameters=(vit.CHANNELS * patch_size**2 + class_count) * width,
        input_layers=4,
    )
    input_bytes, cast_bytes = _count_image_bytes(cell, image_size)
    return ModelFacts(
        parameters=model_shape.layer_count * block_parameters + front_parameters + back_parameters,
        block_count=model_shape.layer_count,
        block_parameters=block_parameters,
        largest_block_parameters=block_parameters,
        front_parameters=front_parameters,
        back_parameters=back_parameters,
        tied_parameters=0,
        flops_per_item=vit.count_flops_per_image(model_shape, image_size, patch_size, class_count),
        saved_bytes=msgspec.structs.replace(saved_bytes, head=saved_bytes.head + cast_bytes, inputs=input_bytes),
        model_kind="transformer",
        saved_bytes_source=FORMULA_SOURCE,
        attention_flops_per_item=12.0 * model_shape.layer_count * width * token_count**2,
        # the projection of patches, whose pixels need no gradient, and the classifier
        head_flops_per_item=4.0 * vit.CHANNELS * patch_size**2 * width * (token_count - 1) + 6.0 * width * class_count,
        width=width,
    )


def _count_image_bytes(cell: Cell, image_size: int) -> tuple[float, float]:
    """The bytes of an image of size x size pixels with its label, as they are loaded, and of its copy in 16 bits, if any."""
    pixel_count = vit.CHANNELS * image_size**2
    return 4.0 * pixel_count + 8.0, 0.0 if precision.computed_bytes(cell.precision) == 4 else 2.0 * pixel_count


def _count_saved_bytes(
    cell: Cell,
    model_shape: Shape,
    token_count: int,
    *,
    extra_elements: int,
    logit_count: int,
    head_parameters: int,
    input_layers: int = 2,
) -> SavedBytes:
    """What a model of GPT-2 or ViT saves for backward.

    extra_elements: the number of further elements per token that a block saves and that tensor-parallel ranks split.
    head_parameters: parameters of matrices outside of blocks. input_layers: the number of layers of a block that read a normed
    hidden state. Each of them casts it under autocast."""
    computed_bytes, stream_bytes = precision.computed_bytes(cell.precision), precision.stream_bytes(cell.precision)
    width = model_shape.width
    uses_autocast = cell.precision in precision.AUTOCAST
    gathered_bytes = token_count * (input_layers if uses_autocast else 2) * width * computed_bytes
    mask_bytes = 2 * width if cell.options.get("dropout") else 0
    return SavedBytes(
        # 4 * stream: each of the two norms saves two numbers per token
        block_whole=token_count * (2 * width * stream_bytes + 4 * stream_bytes + mask_bytes) + gathered_bytes,
        # 4 * heads: attention saves a sum in fp32 for each head
        block_split=token_count * ((12 * width + extra_elements) * computed_bytes + 4 * model_shape.head_count),
        block_input=token_count * width * stream_bytes,
        head=token_count * width * (stream_bytes + computed_bytes) + logit_count * computed_bytes,
        logits=logit_count * computed_bytes,
        weights=12 * width**2 * computed_bytes if uses_autocast else 0,
        head_weights=head_parameters * computed_bytes if uses_autocast else 0,
        inputs=TOKEN_BYTES * (token_count + 1),
        block_gathered=gathered_bytes,
    )


def _compute_llama_facts(cell: Cell, workload: Workload) -> ModelFacts:
    model_shape, token_count, vocabulary_size = read_shape(cell), cast("int", cell.seq_len), workload.settings["vocabulary"]
    computed_bytes, stream_bytes = precision.computed_bytes(cell.precision), precision.stream_bytes(cell.precision)
    width, inner_width = model_shape.width, llama.compute_inner_width(model_shape.width)
    parameters = llama.count_parameters(model_shape, vocabulary_size)
    block_parameters = 4 * width**2 + 3 * width * inner_width + 2 * width
    uses_autocast = cell.precision in precision.AUTOCAST
    # under autocast, each of the five layers that read a normed hidden state casts it
    gathered_bytes = token_count * (5 if uses_autocast else 2) * width * computed_bytes
    return ModelFacts(
        parameters=parameters,
        block_count=model_shape.layer_count,
        block_parameters=block_parameters,
        largest_block_parameters=block_parameters,
        front_parameters=vocabulary_size * width,
        back_parameters=vocabulary_size * width + width,
        tied_parameters=0,
        flops_per_item=token_count * llama.count_flops_per_token(parameters, model_shape, vocabulary_size, token_count),
        saved_bytes=SavedBytes(
            block_whole=token_count * (2 * width * 4 + 8 + 2 * width * stream_bytes) + gathered_bytes,
            block_split=token_count
            * (4 * width * computed_bytes + 4 * inner_width * computed_bytes + 4 * model_shape.head_count),
            block_input=token_count * width * stream_bytes,
            head=token_count * width * (4 + stream_bytes + computed_bytes) + token_count * vocabulary_size * computed_bytes,
            logits=token_count * vocabulary_size * computed_bytes,
            weights=(4 * width**2 + 3 * width * inner_width) * computed_bytes if uses_autocast else 0,
            head_weights=vocabulary_size * width * computed_bytes if uses_autocast else 0,
            inputs=TOKEN_BYTES * (token_count + 1),
            block_gathered=gathered_bytes,
        ),
        model_kind="transformer",
        saved_bytes_source=FORMULA_SOURCE,
        attention_flops_per_item=12.0 * model_shape.layer_count * width * token_count**2,
        head_flops_per_item=6.0 * vocabulary_size * width * token_count,
        vocabulary_rows=vocabulary_size,
        width=width,
        is_causal=True,
    )


# a factor: autocast keeps some tensors of convolutional networks in fp32; counted for convnext-large-tiny: 1.055
AUTOCAST_FACTOR = 1.1


def _compute_convolutional_facts(cell: Cell, workload: Workload) -> ModelFacts:
    network = read_counted_networks()[cell.workload]
    image_size = ImageOptions(cell.options).image_size
    pixel_ratio = (image_size / network.image_size) ** 2
    input_bytes, cast_bytes = _count_image_bytes(cell, image_size)
    # without a cast, the first layer saves the batch itself, which counts as `inputs`
    bytes_per_image = network.half * pixel_ratio if cast_bytes else network.fp32 * pixel_ratio - input_bytes
    bytes_per_image *= AUTOCAST_FACTOR if cell.precision in precision.AUTOCAST else 1
    outside_parameters = workload.parameters - network.in_blocks
    flops_per_image = None if workload.flops_per_unit is None else workload.flops_per_unit * pixel_ratio
    return ModelFacts(
        parameters=workload.parameters,
        block_count=network.blocks,
        block_parameters=network.in_blocks // network.blocks,
        largest_block_parameters=network.largest_block,
        front_parameters=outside_parameters,
        back_parameters=0,
        tied_parameters=0,
        flops_per_item=flops_per_image,
        saved_bytes=SavedBytes(
            bytes_per_image / network.blocks, 0.0, bytes_per_image / network.blocks, 0.0, 0.0, inputs=input_bytes
        ),
        model_kind="convolution",
        saved_bytes_source=f"saved activations counted at {network.image_size} pixels",
        attention_flops_per_item=0.0,
    )


PER_ITEM_FIELDS = ("block_whole", "block_split", "block_input", "head", "logits", "inputs")
COUNTED_PRECISIONS: dict[str, str] = {"tf32": "fp32", "fp16": "bf16", "bf16-pure": "bf16", "fp16-autocast": "bf16-autocast"}
LAYERS_OPTION = "n_layer"  # the option of a model by configuration that keeps only the first blocks


def are_facts_known(cell: Cell) -> bool:
    """Whether the facts of a cell's model are known. The description of a workspace's own model is valid for its default
    options; of a model by configuration, the first blocks are known too."""
    workload = menu.find_workload_of_cell(cell)
    if workload.file is None or workload.has_default_options(cell):
        return True
    default_layers = _find_default_value(workload, LAYERS_OPTION)
    return workload.is_data and default_layers in (cell.options.get(LAYERS_OPTION), len(workload.block_parameters))


def _find_default_value(workload: Workload, option_name: str) -> OptionValue:
    return next((option.default for option in workload.options if option.name == option_name), None)


def _compute_described_facts(cell: Cell, workload: Workload) -> ModelFacts:
    """The facts of a workspace's own model by its description. What is not known is left out: without the saved activations,
    the memory of this model is a lower bound."""
    counts, all_block_sizes = workload.counts, workload.block_parameters
    block_sizes = all_block_sizes
    if (default_layers := _find_default_value(workload, LAYERS_OPTION)) is not None:
        added_layers = cast("int", cell.options[LAYERS_OPTION]) - cast("int", default_layers)
        block_sizes = all_block_sizes[: len(all_block_sizes) + added_layers]
    has_equal_blocks, length_ratio = len(set(all_block_sizes)) <= 1, _find_length_ratio(cell, workload)
    changed_options = {option.name for option in workload.options if cell.options.get(option.name) != option.default}
    has_other_head = workload.unit == "images" and "data" in changed_options  # the data set may have another number of classes
    outside_parameters = 0 if has_other_head else workload.parameters - sum(all_block_sizes)
    flops_per_unit = workload.flops_per_unit if not changed_options and length_ratio == 1 else None
    facts = ModelFacts(
        parameters=sum(block_sizes) + outside_parameters,
        block_count=len(block_sizes),
        # which stage of a pipeline has which blocks is known if they are equal
        block_parameters=0 if not block_sizes else min(block_sizes) if cell.pp > 1 else sum(block_sizes) // len(block_sizes),
        largest_block_parameters=max(block_sizes, default=0),
        # a lower bound: tensor-parallel ranks may split what is outside of the blocks of a model by configuration
        front_parameters=0 if cell.pp > 1 else outside_parameters // cell.tp if workload.is_data else outside_parameters,
        back_parameters=0,
        tied_parameters=0,
        flops_per_item=flops_per_unit * (cell.seq_len or 1) if flops_per_unit else None,
        saved_bytes=None,
        model_kind="unknown",
        saved_bytes_source="activations are not known, so memory is a lower bound",
    )
    if counts is None or (len(block_sizes) < len(all_block_sizes) and not has_equal_blocks):
        return facts
    block_share = len(block_sizes) / len(all_block_sizes) if all_block_sizes else 1.0
    attention_flops, head_flops = (block_share * counts.attention_flops * length_ratio**2, counts.other_flops * length_ratio)
    block_flops = block_share * max(0.0, counts.block_flops - counts.attention_flops) * length_ratio + attention_flops
    facts = msgspec.structs.replace(
        facts,
        flops_per_item=block_flops + head_flops or None,
        model_kind=counts.kind,
        unaligned_flops_per_item=head_flops if counts.vocabulary % ALIGNED_MULTIPLE else 0.0,
        attention_flops_per_item=attention_flops,
        head_flops_per_item=head_flops,
        width=counts.width,
        vocabulary_rows=counts.vocabulary if counts.splits_vocabulary else 0,
        is_causal=counts.is_causal,
    )
    saved_bytes = counts.saved.get(COUNTED_PRECISIONS.get(cell.precision, cell.precision))
    if saved_bytes is None or has_other_head or "dropout" in changed_options or (cell.pp > 1 and not has_equal_blocks):
        return facts
    front_parameters, back_parameters, tied_parameters = counts.end_parameters
    saved_bytes = _scale_saved_bytes(saved_bytes, length_ratio)
    gathered_bytes = min(_count_gathered_bytes(cell, counts), saved_bytes.block_whole)
    return msgspec.structs.replace(
        facts,
        block_parameters=sum(block_sizes) // max(1, len(block_sizes)),
        front_parameters=front_parameters,
        back_parameters=back_parameters,
        tied_parameters=tied_parameters,
        saved_bytes=msgspec.structs.replace(saved_bytes, block_gathered=gathered_bytes),
        saved_bytes_source="saved activations counted in the model",
    )


def _count_gathered_bytes(cell: Cell, counts: ModelCounts) -> float:
    """What sequence parallelism gathers in a block, in bytes per item: the hidden states that the pairs of split layers read.
    Under autocast, each layer that is split by columns has a copy."""
    if counts.reductions is None or counts.width is None:
        return 0.0
    row_layers, column_layers = counts.reductions
    input_copies = column_layers if cell.precision in precision.AUTOCAST else row_layers
    return float(input_copies * (cell.seq_len or 0) * counts.width * precision.computed_bytes(cell.precision))


def _find_length_ratio(cell: Cell, workload: Workload) -> float:
    """The size of an item of a cell, in tokens or pixels, divided by its size with the workload's default options."""
    if cell.seq_len is not None and workload.seq_len is not None:
        return cell.seq_len / workload.seq_len
    image_size, default_image_size = cell.options.get("image_size"), _find_default_value(workload, "image_size")
    return (
        (image_size / default_image_size) ** 2 if isinstance(image_size, int) and isinstance(default_image_size, int) else 1.0
    )


def _scale_saved_bytes(saved: SavedBytes, length_ratio: float) -> SavedBytes:
    """What is saved of an item that is `length_ratio` times as long."""
    scaled_bytes = {field_name: getattr(saved, field_name) * length_ratio for field_name in PER_ITEM_FIELDS}
    scaled_bytes["block_whole"] = max(0.0, scaled_bytes["block_whole"] + saved.block_squared * (length_ratio**2 - length_ratio))
    return msgspec.structs.replace(saved, **scaled_bytes)
