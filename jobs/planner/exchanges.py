"""Computes without torch what a rank exchanges in a step, by strategy. `Engine.theory` of the trainers uses the same theory.

tests/test_planner_exchanges.py compares the results with numbers that were worked out by hand for each strategy. The sent bytes
are the bytes that the ring algorithm sends (Patarasuk and Yuan, 2009): over n ranks, each rank sends 2 (n-1)/n S bytes for an
all-reduce of S bytes, (n-1)/n S for an all-gather with a result of S bytes or a reduce-scatter of S bytes, and S for a send.
"""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from jobs.planner import model_facts, pipeline_share, sharding
from jobs.planner.model_facts import ModelFacts
from jobs.planner.sharding import strategy
from shardlab.matrix.cell import Cell
from trainers.model import precision

Axis = Literal["dp", "replicas", "tp", "pp"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
# Factor f of each collective: over n ranks, a rank sends f (n-1)/n bytes for each byte of the tensor.
FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0}
BACKWARD_REDUCTIONS = {"gpt2": 2, "llama": 5, "vit": 4}  # all-reduces per block in backward: one for each column-parallel layer
FORWARD_REDUCTIONS = 2  # all-reduces per block in forward: one for each row-parallel layer


class Exchange(msgspec.Struct, frozen=True):
    """One kind of communication of a rank in a step, such as all its all-reduces of gradients.

    payload_bytes: the bytes of the tensors of all calls in a step together. calls: the number of calls in a step. ranks: the
    number of ranks that take part in a call. axis: the dimension of the mesh whose ranks communicate. hidden: whether the rank
    may compute at the same time.
    """

    op: Collective
    payload_bytes: float
    calls: float
    ranks: int
    axis: Axis
    hidden: bool

    @property
    def sent_bytes(self) -> float:
        """The number of bytes that the rank sends in a step for this communication."""
        return (
            self.payload_bytes if self.op == "send" else FACTORS[self.op] * (self.ranks - 1) / self.ranks * self.payload_bytes
        )


def of(cell: Cell) -> list[Exchange] | None:
    """The exchanges of the rank that sends the most bytes; None if those of the cell's strategy or model are not known."""
    if not model_facts.are_known(cell):
        return None
    facts, engine = model_facts.of(cell), strategy(cell.strategy).engine.rpartition(".")[2]
    if engine == "single" or (cell.gpus == 1 and not cell.servers):
        return []
    if engine == "ddp":
        return None if strategy(cell.strategy).settings.get("powersgd") else _ddp(cell, facts)
    if engine in ("fsdp1", "fsdp2"):
        return _sharded(cell, facts, facts.parameters, engine)
    if engine == "zero":
        return _zero(cell, facts)
    if engine in ("tensor", "pipeline", "mesh"):
        return _mesh(cell, facts)
    return None


def sent_bytes(cell: Cell) -> float | None:
    """The number of bytes sent in a step by the rank that sends the most bytes; None if it is not known."""
    found = of(cell)
    return None if found is None else sum(exchange.sent_bytes for exchange in found)


MIB = 1 << 20


def _ddp(cell: Cell, facts: ModelFacts) -> list[Exchange]:
    weight = 2 if cell.options.get("comm_hook") == "bf16" else precision.weight_bytes(cell.precision)
    whole = facts.parameters * weight
    buckets = max(1, -(-whole // (cast("int", cell.options.get("bucket_cap_mb", 25)) * MIB)))
    return [Exchange("all_reduce", whole, buckets, cell.dp, "dp", True)]


def _sharded(cell: Cell, facts: ModelFacts, parameters: float, engine: str) -> list[Exchange]:
    """The exchanges of an FSDP strategy; docs/strategies.md says when FSDP gathers blocks and the other layers.

    parameters: the number of parameters in the rank's part of the model.
    """
    computed, weight = precision.computed_bytes(cell.precision), precision.weight_bytes(cell.precision)
    settings, passes, ranks = strategy(cell.strategy).settings, cell.gradient_accumulation_steps, sharding.shards(cell)
    if settings.get("sharding") == "NO_SHARD":
        return [Exchange("all_reduce", parameters * weight, facts.blocks + 1, cell.dp, "dp", True)]
    share = parameters / facts.parameters
    in_blocks = facts.blocks * facts.block_parameters * share if facts.blocks else 0.0
    whole_unit = cell.options.get("wrap") == "none"
    rest = parameters if whole_unit else parameters - in_blocks
    in_blocks = 0.0 if whole_unit else in_blocks
    frees = settings.get("reshard_after_forward", settings.get("sharding") in ("FULL_SHARD", "HYBRID_SHARD"))
    of_blocks, of_rest = (2 * passes if frees else passes), passes
    if engine == "fsdp1" and not frees:
        of_blocks = of_rest = 1
    if engine == "mesh":
        pipelined = "pp" in strategy(cell.strategy).degrees
        of_blocks, of_rest = (1, 1) if pipelined else (2 * passes, passes)
    gathers = Exchange(
        "all_gather", computed * (in_blocks * of_blocks + rest * of_rest), facts.blocks * of_blocks + of_rest, ranks, "dp", True
    )
    found = [gathers, Exchange("reduce_scatter", parameters * weight, facts.blocks + 1, ranks, "dp", True)]
    if (replicas := cell.dp // ranks) > 1:
        found.append(Exchange("all_reduce", parameters * weight / ranks, facts.blocks + 1, replicas, "replicas", True))
    return found


def _zero(cell: Cell, facts: ModelFacts) -> list[Exchange] | None:
    stage, options = cast("int", strategy(cell.strategy).settings["stage"]), cell.options
    if options.get("quantized_weights") or options.get("quantized_gradients") or options.get("hpz_partition_size", 1) != 1:
        return None
    weight, passes, elements = precision.computed_bytes(cell.precision), cell.gradient_accumulation_steps, facts.parameters
    sent = 2 if options.get("communication_dtype") == "bf16" else 4
    bucket = min(elements, cast("int", options.get("reduce_bucket_size") or sharding.BUCKET_ELEMENTS))
    calls, hidden = max(1, -(-elements // bucket)), options.get("overlap_comm") is True
    if stage == 0:
        return [Exchange("all_reduce", elements * sent, calls, cell.dp, "dp", False)]
    if stage < 3:
        times = passes if stage == 2 else 1
        return [
            Exchange("all_reduce", elements * sent * times, calls * times, cell.dp, "dp", hidden),
            Exchange("all_gather", elements * weight, calls, cell.dp, "dp", False),
        ]
    stays = sharding.KEPT * elements <= cast("int", options["max_reuse_distance"])
    fetches = passes if stays else 2 * passes
    return [
        Exchange("all_gather", elements * weight * fetches, (facts.blocks + 1) * fetches, cell.dp, "dp", True),
        Exchange("reduce_scatter", elements * sent * passes, calls * passes, cell.dp, "dp", hidden),
    ]


def _mesh(cell: Cell, facts: ModelFacts) -> list[Exchange] | None:
    """The exchanges of a strategy with tensor parallelism, with a pipeline, or with both, also combined with sharding. With a
    pipeline, these are the exchanges of a rank in the middle of the pipeline. None if the exchanges are not known."""
    saved = facts.saved
    if saved is None:
        return None
    found = []
    passes, micro = cell.gradient_accumulation_steps, cell.micro_batch_size
    blocks = -(-facts.blocks // cell.pp)
    if cell.tp > 1:
        family = sharding.task_of(cell)
        if family not in BACKWARD_REDUCTIONS:
            return None
        written = saved.block_input * micro / precision.stream_bytes(cell.precision) * precision.computed_bytes(cell.precision)
        read, times = saved.block_input * micro, blocks * passes
        again = recomputed_blocks(cell, blocks) * passes
        forward = FORWARD_REDUCTIONS * times + (FORWARD_REDUCTIONS - 1) * again
        backward = BACKWARD_REDUCTIONS[family] * times
        found += [
            Exchange("all_reduce", written * forward, forward, cell.tp, "tp", False),
            Exchange("all_reduce", read * backward, backward, cell.tp, "tp", False),
        ]
        if cell.options.get("sequence_parallel"):
            # With sequence parallelism, each all-reduce becomes a reduce-scatter and an all-gather, which together take as
            # long. One more such pair is needed for the input of the first block and the output of the last block.
            found.append(Exchange("all_reduce", saved.block_input * micro * passes, passes, cell.tp, "tp", False))
    if cell.pp > 1:
        per_rank = pipeline_share.stages_per_rank(cell)
        # A stage sends a hidden state to the next stage and a gradient to the previous stage. The first and the last stage of
        # the model send only one of the two; they are on different ranks.
        messages = passes * (2 * per_rank if cell.pp > 2 else 2 * per_rank - 1)
        found.append(Exchange("send", saved.block_input * micro * messages, messages, cell.pp, "pp", False))
        if facts.tied:
            size = facts.tied * precision.weight_bytes(cell.precision)
            found.append(Exchange("all_reduce", size, 1, 2, "pp", False))
    if cell.dp > 1:
        part = blocks * facts.block_parameters / cell.tp + (facts.front + facts.back - facts.tied) / (1 if cell.pp == 1 else 2)
        found += _sharded(cell, facts, part, "mesh")
    return found


def recomputed_blocks(cell: Cell, blocks: int) -> int:
    """The number of blocks whose activations are recomputed during the backward pass."""
    which, _, number = cell.activation_checkpointing.partition("-")
    if which == "none":
        return 0
    if which == "full":
        return blocks
    if which == "every":
        return -(-blocks // int(number))
    return blocks - -(-blocks // int(number))
