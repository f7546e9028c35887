"""Predicts the host memory of the processes of a run on a node. Pages that processes share, such as code, count as nothing."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.planner import memory, model_facts, sharding
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import PredictedRange, Prediction, make_exact_range, sum_ranges
from trainers import menu
from trainers.model import precision
from trainers.strategy_options import Fsdp2Options, Zero3Options

WARNED_SHARE = 0.8  # of the memory of a node: above it, the rest may not be enough for the system and its file cache
KEPT_CATEGORIES = ("parameter", "optimizer_state", "master_parameter")
WHOLE_MODEL_ENGINES = ("ddp", "local_sgd", "single", "zero")  # their ranks each make the whole model in host memory


def predict_host_bytes(
    cell: Cell, node_bytes: float | None, *, on_gpu: bool, tensors_by_category: Mapping[str, PredictedRange]
) -> PredictedRange | None:
    """The host memory on the node that needs most, in bytes; None for parameter servers, whose memory is not known.

    The low end is without the same-work proof, because its result may be stored. tensors_by_category: the bytes of a rank's
    tensors by category, which are in host memory if there is no GPU. node_bytes: the bytes of memory of a node; None: not
    known."""
    if cell.servers:
        return None
    terms, ranks_per_node = memory.read_memory_terms(), -(-cell.gpus // cell.nnodes)
    strategy, workload = sharding.find_strategy(cell.strategy), menu.find_workload_of_cell(cell)
    engine, parameters = strategy.engine.rpartition(".")[2], model_facts.find_model_facts(cell).parameters
    rank_bytes = terms["rank_gpu" if on_gpu else "rank_fork" if cell.launcher == "fork" else "rank_process"].scale(memory.MIB)
    if engine == "zero" and cell.launcher != "fork":
        rank_bytes += terms["rank_deepspeed"].scale(memory.MIB)
    process_bytes = rank_bytes.times(ranks_per_node) + terms[f"node_{cell.launcher}"].scale(memory.MIB)
    has_second_copy = Zero3Options(cell.options).hpz_partition_size != 1
    makes_whole = engine in WHOLE_MODEL_ENGINES and (cell.strategy != "zero3" or has_second_copy)
    initial_bytes = 4.0 * parameters * (ranks_per_node if makes_whole else 1)  # in fp32, until it is on the GPUs
    tensor_bytes = make_exact_range(max(initial_bytes, ranks_per_node * _count_offloaded_bytes(cell, parameters)))
    if not on_gpu:
        # Only what ranks keep from step to step is in memory at the same time; of a pipeline, that of one of its ranks.
        kept_bytes = sum(
            tensors_by_category[category].low for category in KEPT_CATEGORIES if category in tensors_by_category
        ) * (1 if cell.pp > 1 else ranks_per_node)
        tensor_term, likely_tensor_bytes = terms["host_tensors"], sum_ranges(tensors_by_category).likely * ranks_per_node
        tensor_bytes = PredictedRange(
            kept_bytes, likely_tensor_bytes * tensor_term.likely, likely_tensor_bytes * tensor_term.high
        )
    # The proof keeps the parameters before and after its steps on each rank, and rank 0 also those of the reference.
    proof_bytes = 8.0 * parameters * (ranks_per_node + 1)
    is_proven = cell.prove != "off" and strategy.unprovable(cell) is None
    if is_proven and (not workload.proof_options or (node_bytes is not None and 16 * parameters < node_bytes)):
        bytes_with_proof = initial_bytes + proof_bytes if on_gpu else tensor_bytes.likely + proof_bytes
        tensor_bytes = PredictedRange(
            tensor_bytes.low, max(tensor_bytes.likely, bytes_with_proof), max(tensor_bytes.high, bytes_with_proof)
        )
    return process_bytes + tensor_bytes


def _count_offloaded_bytes(cell: Cell, parameters: int) -> float:
    """The bytes of weights, gradients and optimizer state that a rank keeps in host memory although it has a GPU."""
    options, parameter_state_bytes = Zero3Options(cell.options), memory.count_state_bytes(cell)
    parameter_bytes = precision.weight_bytes(cell.precision)
    offloaded_bytes = 0.0
    if Fsdp2Options(cell.options).offload == "cpu":
        offloaded_bytes += (2 * parameter_bytes + parameter_state_bytes) * parameters / cell.shards
    if options.offload_optimizer == "cpu":  # DeepSpeed keeps weights and gradients in fp32 beside the states
        offloaded_bytes += (2 * parameter_bytes + parameter_state_bytes) * parameters / cell.dp
    if options.offload_param == "cpu":
        offloaded_bytes += precision.computed_bytes(cell.precision) * parameters / cell.dp
    return offloaded_bytes


def exceeds_node(prediction: Prediction) -> bool:
    """Whether a run certainly needs more host memory than a node has."""
    needed_bytes, node_bytes = prediction.host_bytes, prediction.host_capacity_bytes
    return needed_bytes is not None and node_bytes is not None and needed_bytes.low > node_bytes


def nearly_fills_node(prediction: Prediction) -> bool:
    """Whether a run is likely to need more than WARNED_SHARE of the memory of a node."""
    needed_bytes, node_bytes = prediction.host_bytes, prediction.host_capacity_bytes
    return needed_bytes is not None and node_bytes is not None and needed_bytes.likely > WARNED_SHARE * node_bytes
