"""Computes without torch what a rank exchanges in a step, by strategy. `Engine.theory` of the trainers uses the same theory.

tests/jobs/planner/test_exchanges.py compares the results with numbers that were worked out by hand for each strategy. The sent
bytes are the bytes that the ring algorithm sends (Patarasuk and Yuan, 2009): over n ranks, each rank sends 2 (n-1)/n S bytes
for an all-reduce of S bytes, (n-1)/n S for an all-gather with a result of S bytes or a reduce-scatter of S bytes, and S for a
send."""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from jobs.planner import model_facts, pipeline_share, sharding
from jobs.planner.model_facts import ModelFacts
from jobs.planner.sharding import find_strategy
from shardlab.matrix.cell import Cell
from trainers.model import precision

Axis = Literal["dp", "replicas", "tp", "pp"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
# Factor f of each collective: over n ranks, a rank sends f (n-1)/n bytes for each byte of the tensor.
FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0}
BACKWARD_REDUCTIONS = {"gpt2": 2, "llama": 5, "vit": 4}  # all-reduces per block in backward: one for each column-parallel layer
FORWARD_REDUCTIONS = 2  # all-reduces per block in forward: one for each row-parallel layer


class Exchange(msgspec.Struct, frozen=True):
    """One kind of communication of a rank in a step, such as all its all-reduces of gradients."""

    op: Collective
    payload_bytes: float
    """The bytes of the tensors of all calls in a step together."""
    calls: float
    """The number of calls in a step."""
    ranks: int
    """The number of ranks that take part in a call."""
    axis: Axis
    """The dimension of the mesh whose ranks communicate."""
    hidden: bool
    """Whether the rank may compute at the same time."""

    @property
    def sent_bytes(self) -> float:
        """The number of bytes that the rank sends in a step for this communication."""
        return (
            self.payload_bytes if self.op == "send" else FACTORS[self.op] * (self.ranks - 1) / self.ranks * self.payload_bytes
        )


def list_exchanges(cell: Cell) -> list[Exchange] | None:
    """The exchanges of the rank that sends the most bytes; None if those of the cell's strategy or model are not known."""
    if not model_facts.are_facts_known(cell):
        return None
    facts, engine = model_facts.find_model_facts(cell), find_strategy(cell.strategy).engine.rpartition(".")[2]
    if engine == "single" or (cell.gpus == 1 and not cell.servers):
        return []
    if engine == "ddp":
        return None if find_strategy(cell.strategy).settings.get("powersgd") else _ddp_exchanges(cell, facts)
    if engine in ("fsdp1", "fsdp2"):
        return _fsdp_exchanges(cell, facts, facts.parameters, engine)
    if engine == "zero":
        return _zero_exchanges(cell, facts)
    if engine in ("tensor", "pipeline", "mesh"):
        return _mesh_exchanges(cell, facts)
    return None


def sum_sent_bytes(cell: Cell) -> float | None:
    """The number of bytes sent in a step by the rank that sends the most bytes; None if it is not known."""
    known_exchanges = list_exchanges(cell)
    return None if known_exchanges is None else sum(exchange.sent_bytes for exchange in known_exchanges)


MIB = 1 << 20


def _ddp_exchanges(cell: Cell, facts: ModelFacts) -> list[Exchange]:
    weight = 2 if cell.options.get("comm_hook") == "bf16" else precision.weight_bytes(cell.precision)
    gradient_bytes = facts.parameters * weight
    bucket_count = max(1, -(-gradient_bytes // (cast("int", cell.options.get("bucket_cap_mb", 25)) * MIB)))
    return [Exchange("all_reduce", gradient_bytes, bucket_count, cell.dp, "dp", True)]


def _fsdp_exchanges(cell: Cell, facts: ModelFacts, parameters: float, engine: str) -> list[Exchange]:
    """The exchanges of an FSDP strategy; docs/strategies.md says when FSDP gathers blocks and the other layers.

    parameters: the number of parameters in the rank's part of the model.
    """
    computed, weight = precision.computed_bytes(cell.precision), precision.weight_bytes(cell.precision)
    settings, passes = find_strategy(cell.strategy).settings, cell.gradient_accumulation_steps
    ranks = sharding.count_shards(cell)
    if settings.get("sharding") == "NO_SHARD":
        return [Exchange("all_reduce", parameters * weight, facts.blocks + 1, cell.dp, "dp", True)]
    share_of_model = parameters / facts.parameters
    parameters_in_blocks = facts.blocks * facts.block_parameters * share_of_model if facts.blocks else 0.0
    is_one_unit = cell.options.get("wrap") == "none"
    rest_parameters = parameters if is_one_unit else parameters - parameters_in_blocks
    parameters_in_blocks = 0.0 if is_one_unit else parameters_in_blocks
    frees_gathered = settings.get("reshard_after_forward", settings.get("sharding") in ("FULL_SHARD", "HYBRID_SHARD"))
    block_gathers, rest_gathers = (2 * passes if frees_gathered else passes), passes
    if engine == "fsdp1" and not frees_gathered:
        block_gathers = rest_gathers = 1
    if engine == "mesh":
        pipelined = "pp" in find_strategy(cell.strategy).degrees
        block_gathers, rest_gathers = (1, 1) if pipelined else (2 * passes, passes)
    gathered_bytes = computed * (parameters_in_blocks * block_gathers + rest_parameters * rest_gathers)
    gathers = Exchange("all_gather", gathered_bytes, facts.blocks * block_gathers + rest_gathers, ranks, "dp", True)
    exchanges = [gathers, Exchange("reduce_scatter", parameters * weight, facts.blocks + 1, ranks, "dp", True)]
    if (replicas := cell.dp // ranks) > 1:
        exchanges.append(Exchange("all_reduce", parameters * weight / ranks, facts.blocks + 1, replicas, "replicas", True))
    return exchanges


def _zero_exchanges(cell: Cell, facts: ModelFacts) -> list[Exchange] | None:
    stage, options = cast("int", find_strategy(cell.strategy).settings["stage"]), cell.options
    if options.get("quantized_weights") or options.get("quantized_gradients") or options.get("hpz_partition_size", 1) != 1:
        return None
    weight, passes, elements = precision.computed_bytes(cell.precision), cell.gradient_accumulation_steps, facts.parameters
    sent_element_bytes = 2 if options.get("communication_dtype") == "bf16" else 4
    bucket_elements = min(elements, cast("int", options.get("reduce_bucket_size") or sharding.BUCKET_ELEMENTS))
    calls, hidden = max(1, -(-elements // bucket_elements)), options.get("overlap_comm") is True
    if stage == 0:
        return [Exchange("all_reduce", elements * sent_element_bytes, calls, cell.dp, "dp", False)]
    if stage < 3:
        times = passes if stage == 2 else 1
        return [
            Exchange("all_reduce", elements * sent_element_bytes * times, calls * times, cell.dp, "dp", hidden),
            Exchange("all_gather", elements * weight, calls, cell.dp, "dp", False),
        ]
    stays_gathered = sharding.USES_PER_PASS * elements <= cast("int", options["max_reuse_distance"])
    fetches = passes if stays_gathered else 2 * passes
    return [
        Exchange("all_gather", elements * weight * fetches, (facts.blocks + 1) * fetches, cell.dp, "dp", True),
        Exchange("reduce_scatter", elements * sent_element_bytes * passes, calls * passes, cell.dp, "dp", hidden),
    ]


def _mesh_exchanges(cell: Cell, facts: ModelFacts) -> list[Exchange] | None:
    """The exchanges of a strategy with tensor parallelism, with a pipeline, or with both, also combined with sharding. With a
    pipeline, these are the exchanges of a rank in the middle of the pipeline. None if the exchanges are not known."""
    saved = facts.saved
    if saved is None:
        return None
    exchanges = []
    passes, micro = cell.gradient_accumulation_steps, cell.micro_batch_size
    blocks = -(-facts.blocks // cell.pp)
    if cell.tp > 1:
        family = sharding.find_task_name(cell)
        if family not in BACKWARD_REDUCTIONS:
            return None
        output = saved.block_input * micro / precision.stream_bytes(cell.precision) * precision.computed_bytes(cell.precision)
        input_bytes, block_passes = saved.block_input * micro, blocks * passes
        recomputed_passes = count_recomputed_blocks(cell, blocks) * passes
        forward = FORWARD_REDUCTIONS * block_passes + (FORWARD_REDUCTIONS - 1) * recomputed_passes
        backward = BACKWARD_REDUCTIONS[family] * block_passes
        exchanges += [
            Exchange("all_reduce", output * forward, forward, cell.tp, "tp", False),
            Exchange("all_reduce", input_bytes * backward, backward, cell.tp, "tp", False),
        ]
        if cell.options.get("sequence_parallel"):
            # With sequence parallelism, each all-reduce becomes a reduce-scatter and an all-gather, which together take as
            # long. One more such pair is needed for the input of the first block and the output of the last block.
            exchanges.append(Exchange("all_reduce", saved.block_input * micro * passes, passes, cell.tp, "tp", False))
    if cell.pp > 1:
        per_rank = pipeline_share.count_stages_per_rank(cell)
        # A stage sends a hidden state to the next stage and a gradient to the previous stage. The first and the last stage of
        # the model send only one of the two; they are on different ranks.
        messages = passes * (2 * per_rank if cell.pp > 2 else 2 * per_rank - 1)
        exchanges.append(Exchange("send", saved.block_input * micro * messages, messages, cell.pp, "pp", False))
        if facts.tied:
            size = facts.tied * precision.weight_bytes(cell.precision)
            exchanges.append(Exchange("all_reduce", size, 1, 2, "pp", False))
    if cell.dp > 1:
        share = blocks * facts.block_parameters / cell.tp + (facts.front + facts.back - facts.tied) / (1 if cell.pp == 1 else 2)
        exchanges += _fsdp_exchanges(cell, facts, share, "mesh")
    return exchanges


def count_recomputed_blocks(cell: Cell, blocks: int) -> int:
    """The number of blocks whose activations are recomputed during the backward pass."""
    mode, _, interval = cell.activation_checkpointing.partition("-")
    if mode == "none":
        return 0
    if mode == "full":
        return blocks
    if mode == "every":
        return -(-blocks // int(interval))
    return blocks - -(-blocks // int(interval))
