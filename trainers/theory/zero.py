"""The theory of DeepSpeed's ZeRO, as DeepSpeed 0.19 is configured here (trainers/deepspeed_zero)."""

from __future__ import annotations

import msgspec

from shardlab.matrix.cell import Cell
from trainers.model import precision
from trainers.strategy_options import Zero3Options, ZeroOptions
from trainers.theory.division import Division
from trainers.theory.term import SCALAR_BYTES, ModelPart, Term, Window

# Default bucket size in elements (100 MB in 16 bits). With DeepSpeed's default of 500 million, a model with less than a billion
# parameters would start its first reduction only when most of backward is over. DeepSpeed allocates memory for whole buckets.
BUCKET_ELEMENTS = 50_000_000
ALL_REDUCED_ELEMENTS = 500_000_000  # DeepSpeed's default for its all-reduces at stage 0
USES_PER_PASS = 2  # a pass uses each parameter twice: if all parameters fit twice into max_reuse_distance, DeepSpeed frees none


def count_sent_gradient_bytes(cell: Cell) -> int:
    """Bytes per element of the gradients that are reduced."""
    return 2 if cell.precision == "bf16-pure" or ZeroOptions(cell.options).communication_dtype == "bf16" else 4


def _count_bucket_elements(cell: Cell, elements: float) -> float:
    """The elements of a bucket, for which DeepSpeed allocates memory whether the model fills them or not."""
    return ZeroOptions(cell.options).reduce_bucket_size or min(elements, BUCKET_ELEMENTS)


def divide_zero(cell: Cell, parameter_count: int, *, stage: int) -> Division:
    """What a rank of a ZeRO stage holds: the weights are in the precision of the computation, and the optimizer keeps fp32
    copies of the rank's part of them."""
    options, rank_count, is_pure = ZeroOptions(cell.options), cell.dp, cell.precision == "bf16-pure"
    computed, accumulates = precision.computed_bytes(cell.precision), cell.gradient_accumulation_steps > 1
    summed, sent = (2 if is_pure else 4), count_sent_gradient_bytes(cell)
    division = Division(
        computed,
        # Without a cast, stage 2 adds the gradients of a pass, in a buffer of their own, to those of earlier passes.
        gradient_bytes=(2 if stage == 2 and accumulates and summed == computed else 1) * (summed if stage >= 2 else computed),
        gradient_ranks=rank_count if stage >= 2 else 1,
        computed_bytes=computed,
        kept_gradient_bytes=summed / rank_count
        if stage == 3 or (stage == 2 and accumulates)
        else computed
        if accumulates
        else 0,
        # a reduction in another type copies the gradients
        reduced_bytes=computed + (sent if sent != computed else 0) if stage >= 2 else computed if accumulates else 0,
        master_bytes=0 if computed == 4 and stage == 0 else summed,
        optimizer_ranks=0 if options.offload_optimizer != "none" else rank_count if stage else 1,
        norm_bytes=8 if stage in (1, 2) else 0,
        bucket_elements=_count_bucket_elements(cell, parameter_count),
        bucket_bytes=sent if stage == 3 else 0,
        bucket_copy_bytes=sent if stage == 3 else computed + (sent if sent != computed else 0) if stage == 2 else 0,
        backward_bucket_bytes=0 if stage == 3 else computed * (2 if options.overlap_comm else 1),
    )
    if stage == 0:
        # DeepSpeed reduces a flat copy of the gradients in parts of 500 million elements, and the optimizer reads them in fp32.
        copied_bytes = computed + (4 if computed == 2 else 0)
        reduction_bytes = max(copied_bytes * min(1, ALL_REDUCED_ELEMENTS / parameter_count), copied_bytes - computed)
        return msgspec.structs.replace(division, bucket_elements=0, reduction_bytes=reduction_bytes)
    if stage == 1 and precision.COMPUTED_IN.get(cell.precision) and not is_pure:
        # DeepSpeed's BF16_Optimizer has no buckets. It keeps all gradients in fp32, in addition to the 16-bit gradients.
        return msgspec.structs.replace(
            division,
            gradient_bytes=summed + computed,
            kept_gradient_bytes=summed + division.kept_gradient_bytes,
            reduced_bytes=summed,
            norm_bytes=0,
            bucket_elements=0,
        )
    if stage == 1:  # the reduced gradients of the rank's part are copied
        return msgspec.structs.replace(division, reduction_bytes=computed / rank_count)
    if stage < 3:
        return division
    stage_3_options = Zero3Options(cell.options)
    partition_size = stage_3_options.hpz_partition_size
    second_copy_bytes = computed * rank_count // partition_size if partition_size > 1 else 0
    return msgspec.structs.replace(
        division,
        weight_bytes=computed + second_copy_bytes if stage_3_options.offload_param == "none" else 0,
        weight_ranks=rank_count,
        # DeepSpeed gathers parameters ahead of their use until max_live_parameters are gathered
        gathers="everything",
        gathered_bytes=computed,
        most_gathered=stage_3_options.max_live_parameters,
        gather_buffer_bytes=computed * min(parameter_count, stage_3_options.prefetch_bucket_size),
    )


def _keeps_parameters(cell: Cell, elements: float) -> bool:
    """Whether no parameter is freed before a pass needs it again, because all of them fit into max_reuse_distance."""
    return USES_PER_PASS * elements <= Zero3Options(cell.options).max_reuse_distance


def list_zero_terms(cell: Cell, model_part: ModelPart, *, stage: int) -> list[Term] | None:
    """What a rank of a ZeRO stage sends in a step; None for ZeRO++ if the shapes of the parameters are not known."""
    rank_count, elements, passes = cell.dp, model_part.elements, cell.gradient_accumulation_steps
    gradient_bytes, overlaps = elements * count_sent_gradient_bytes(cell), ZeroOptions(cell.options).overlap_comm
    window: Window | None = None if not overlaps else "last_backward" if stage < 2 else "backward"
    calls = max(1, -(-elements // _count_bucket_elements(cell, elements)))
    if stage == 0:
        return [Term("gradients, once a step", "all_reduce", gradient_bytes, rank_count, calls=calls)]
    flag_term = Term("gradient norm and overflow, once a step", "all_reduce", 2 * SCALAR_BYTES, rank_count)
    if stage < 3:
        # Also at stage 2, DeepSpeed all-reduces whole buckets; textbooks assume a reduce-scatter.
        exchange_count, when = (passes, "each pass") if stage == 2 else (1, "once a step")
        updated_bytes = elements * precision.computed_bytes(cell.precision)
        return [
            Term(f"gradients, whole buckets to every rank, {when}", "all_reduce", gradient_bytes * exchange_count, rank_count,
                 calls=calls * exchange_count, hides_in=window),
            Term("updated parameters, once a step", "all_gather", updated_bytes, rank_count, calls=calls),
            flag_term,
        ]  # fmt: skip
    gather_terms = _list_gather_terms(cell, model_part)
    if gather_terms is None:
        return None
    quantized_elements = model_part.matrix_elements if Zero3Options(cell.options).quantized_gradients else 0
    exact_bytes = (elements - quantized_elements) * count_sent_gradient_bytes(cell) * passes
    reduce_term = Term("gradients, each pass", "reduce_scatter", exact_bytes, rank_count, calls=calls * passes, hides_in=window)
    return [*gather_terms, reduce_term, *_list_quantized_terms(cell, quantized_elements), flag_term]


def _list_gather_terms(cell: Cell, model_part: ModelPart) -> list[Term] | None:
    """The gathers of parameters at stage 3, which ZeRO++ may quantise or repeat only within a part of the ranks.

    After its use a parameter is freed, unless it is needed again within max_reuse_distance elements. DeepSpeed's default is
    10^9. A model with less than half of this number of elements is therefore gathered once per pass and then kept: it sends
    less and needs more memory than textbooks say.
    """
    options, passes, elements = Zero3Options(cell.options), cell.gradient_accumulation_steps, model_part.elements
    partition_size, weight_bytes = options.hpz_partition_size, precision.computed_bytes(cell.precision)
    if model_part.fetched is None:
        if options.quantized_weights or options.quantized_gradients or partition_size != 1:
            return None
        fetch_count = passes if _keeps_parameters(cell, elements) else USES_PER_PASS * passes
        calls, fetched_bytes = (model_part.blocks + 1) * fetch_count, elements * weight_bytes * fetch_count
        name = "parameters, each time they are gathered"
        return [Term(name, "all_gather", fetched_bytes, cell.dp, calls=calls, hides_in="step")]
    fetched_elements, unsharded_elements = model_part.fetched
    sharded_elements, sent_element_bytes = elements - unsharded_elements, 1 if options.quantized_weights else weight_bytes
    refetched, ranks = fetched_elements * passes - sharded_elements, partition_size if partition_size > 1 else cell.dp
    return [
        Term("sharded parameters, once a step", "all_gather", sharded_elements * sent_element_bytes, cell.dp),
        Term(
            "sharded parameters again, each time a pass needs a freed one", "all_gather", refetched * sent_element_bytes, ranks
        ),
        Term("parameters too small to be sharded, once a step", "all_gather", unsharded_elements * weight_bytes, cell.dp),
    ]


def _list_quantized_terms(cell: Cell, elements: int) -> list[Term]:
    """The reduction of gradients that ZeRO++ quantises to half a byte per element: first within each node, then between nodes.

    The bytes are derived from the source of DeepSpeed 0.19, without the scales of the quantisation (less than 1 %). They have
    not yet been compared with counted bytes, which needs GPUs.
    """
    passes, node_ranks = cell.gradient_accumulation_steps, cell.dp // cell.nnodes
    return [
        Term("matrices' gradients in 4 bits within a node, each pass", "all_to_all", elements / 2, node_ranks, passes),
        Term("their sums in 4 bits between nodes, each pass", "all_to_all", elements / 2 / node_ranks, cell.nnodes, passes),
    ] if elements else []  # fmt: skip
