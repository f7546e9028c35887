"""Computes without torch what a rank sends in a step, with the theory that the menu's entry of a strategy names.

Engines ask the same theory, with the exact sizes of their model; here, the sizes follow from the shape of the model. The
planner does not know buffers, padding, which layers are too small to be sharded, and which norms see a slice of a sequence.
tests/jobs/planner/test_exchanges.py compares the results with numbers that were worked out by hand for each strategy.
"""

from __future__ import annotations

from jobs.planner import model_facts
from jobs.planner.model_facts import ModelFacts
from jobs.planner.sharding import find_strategy
from shardlab.matrix.cell import Cell
from trainers import menu
from trainers.model import precision
from trainers.strategy_options import Zero3Options
from trainers.theory.term import SCALAR_BYTES, ModelPart, Term

# Of a block that is split over tp (`ModelPlan` of trainers/plans): its row-parallel layers, and its column-parallel layers.
FORWARD_REDUCTIONS = 2
BACKWARD_REDUCTIONS = {"gpt2": 2, "llama": 5, "vit": 4}


def list_exchanges(cell: Cell) -> list[Term] | None:
    """The exchanges of the rank that sends the most bytes, without those of single numbers; None if those of the cell's
    strategy or model are not known. Of parameter servers, whose network all workers share, nothing is predicted."""
    if not model_facts.are_facts_known(cell) or cell.servers:
        return None
    if cell.gpus == 1:
        return []
    model_part = _describe_model_part(cell, model_facts.find_model_facts(cell))
    known_exchanges = find_strategy(cell.strategy).theory_of_communication(cell, model_part)
    if known_exchanges is None:
        return None
    return [exchange for exchange in known_exchanges if exchange.payload_bytes > 2 * SCALAR_BYTES]


def sum_sent_bytes(cell: Cell) -> float | None:
    """The number of bytes sent in a step by the rank that sends the most bytes; None if it is not known."""
    known_exchanges = list_exchanges(cell)
    return None if known_exchanges is None else sum(exchange.sent_bytes for exchange in known_exchanges)


def _describe_model_part(cell: Cell, facts: ModelFacts) -> ModelPart:
    """The sizes of a rank's part of the model. With a pipeline, the rank has the blocks and messages of a rank in the middle,
    half of what is outside of blocks, and the exchanges of a split head, for which all stages wait."""
    rank_blocks = -(-facts.block_count // cell.pp)
    block_elements: float = rank_blocks * facts.block_parameters / cell.tp
    rank_elements: float = facts.parameters
    if cell.pp > 1:  # the first and the last stage have a copy of a tied weight each
        rank_elements = block_elements + (facts.front_parameters + facts.back_parameters) / 2
    elif cell.tp > 1:
        rank_elements = block_elements + facts.front_parameters + facts.back_parameters - facts.tied_parameters
    workload = menu.find_workload_of_cell(cell)
    backward_reductions = BACKWARD_REDUCTIONS.get(workload.task.rpartition(".")[2])
    block_reductions = None if workload.counts is None else workload.counts.reductions
    return ModelPart(
        elements=rank_elements,
        blocks=rank_blocks,
        block_elements=block_elements,
        hidden_elements=None if facts.saved_bytes is None
        else facts.saved_bytes.block_input * cell.micro_batch_size / precision.stream_bytes(cell.precision),
        recomputed_blocks=count_recomputed_blocks(cell, rank_blocks),
        fetched=_count_fetched_elements(cell, facts),
        reductions=block_reductions if backward_reductions is None else (FORWARD_REDUCTIONS, backward_reductions),
        has_split_embedding=facts.head_share < 1 and cell.pp == 1,
        split_logit_rows=cell.micro_batch_size * (cell.seq_len or 0) if facts.head_share < 1 else 0,
        # A stage sends a hidden state to the next stage and a gradient to the previous stage. The first and the last stage of
        # the model send only one of the two; they are on different ranks.
        messages=2 * cell.stages_per_rank if cell.pp > 2 else 2 * cell.stages_per_rank - 1,
        tied=((facts.tied_parameters / cell.dp, 2),) if facts.tied_parameters and cell.pp > 1 else (),
    )  # fmt: skip


def _count_fetched_elements(cell: Cell, facts: ModelFacts) -> tuple[int, int] | None:
    """`ModelPart.fetched`, if all parameters are surely too small to be sharded by ZeRO-3; else None: the sizes of single
    parameters are not known, nor what ZeRO++ quantises."""
    options = Zero3Options(cell.options)
    if "param_persistence_threshold" not in cell.options or options.quantized_weights or options.quantized_gradients:
        return None
    # no matrix of a block of GPT-2, Llama or ViT has more than a third of the block's elements
    largest_in_block = facts.largest_block_parameters / (3 if facts.saved_bytes_source == model_facts.FORMULA_SOURCE else 1)
    largest_parameter = max(largest_in_block, facts.front_parameters, facts.back_parameters)
    return (0, facts.parameters) if largest_parameter <= options.param_persistence_threshold else None


def count_recomputed_blocks(cell: Cell, blocks: int) -> int:
    """The number of blocks whose activations are recomputed during the backward pass."""
    checkpointing_mode, _, interval = cell.activation_checkpointing.partition("-")
    if checkpointing_mode == "none":
        return 0
    if checkpointing_mode == "full":
        return blocks
    if checkpointing_mode == "every":
        return -(-blocks // int(interval))
    return blocks - -(-blocks // int(interval))
