"""The theory of strategies whose ranks each have the whole model: DDP, local SGD, and the workers of parameter servers."""

from __future__ import annotations

import msgspec

from shardlab.matrix.cell import Cell
from trainers.model import precision
from trainers.strategy_options import AsynchronousOptions, DdpOptions, LocalSgdOptions
from trainers.theory.division import Division, divide_by_cuts
from trainers.theory.term import ModelPart, Term, list_overflow_terms

MIB = 1 << 20
POWERSGD_RANK = 1  # rank of the matrices with which PowerSGD approximates gradients
EXACT_STEPS = 2  # steps without compression at the start; PowerSGD with error feedback needs at least 2


def divide_ddp(cell: Cell, parameter_count: int) -> Division:
    """What a rank of DDP holds: everything, and buckets, of which the gradients are views. Gradients of earlier passes, which
    DDP does not reduce, are no views, and neither are any without the option."""
    weight, views = precision.weight_bytes(cell.precision), DdpOptions(cell.options).gradient_as_bucket_view
    division = divide_by_cuts(cell)
    kept_bytes = division.kept_gradient_bytes + (weight if views else 0)
    return msgspec.structs.replace(
        division, kept_gradient_bytes=kept_bytes, reduced_bytes=weight if kept_bytes else 0, buffer_bytes=0 if views else weight
    )


def list_ddp_terms(cell: Cell, model_part: ModelPart) -> list[Term]:
    """What a rank of DDP sends in a step: its gradients in buckets, and rank 0's buffers."""
    options = DdpOptions(cell.options)
    element_bytes = 2 if options.comm_hook == "bf16" else precision.weight_bytes(cell.precision)
    gradient_bytes = model_part.elements * element_bytes
    bucket_count = max(1, -(-gradient_bytes // (options.bucket_cap_mb * MIB)))
    name = "gradients, all buckets of a step together: 2 (n-1)/n psi"
    gradient_term = Term(name, "all_reduce", gradient_bytes, cell.dp, calls=bucket_count, hides_in="last_backward")
    return [gradient_term, *_list_buffer_terms(cell, model_part)]


def list_powersgd_terms(cell: Cell, model_part: ModelPart) -> list[Term] | None:
    """As `list_ddp_terms`, with PowerSGD; None if the shapes of the parameters are not known."""
    if model_part.powersgd_bytes is None:
        return None
    uncompressed_bytes, factor_bytes = model_part.powersgd_bytes
    factors_text = f"both factors of rank {POWERSGD_RANK} of the others, once its {EXACT_STEPS} exact steps are over"
    return [
        Term("gradients that are not worth compressing", "all_reduce", uncompressed_bytes, cell.dp),
        Term(factors_text, "all_reduce", factor_bytes, cell.dp),
        *_list_buffer_terms(cell, model_part),
    ]


def _list_buffer_terms(cell: Cell, model_part: ModelPart) -> list[Term]:
    name = "buffers (BatchNorm's statistics), rank 0's to all, once a step"
    return [Term(name, "broadcast", model_part.buffer_bytes, cell.dp)] if model_part.buffer_bytes else []


def get_averaging_period(cell: Cell) -> int:
    """The number of steps between two averages of local SGD."""
    return LocalSgdOptions(cell.options).averaging_period


def list_averaging_terms(cell: Cell, model_part: ModelPart) -> list[Term]:
    """What a rank of local SGD sends in a step, as the mean over the steps between two averages."""
    period = get_averaging_period(cell)
    parameter_bytes = model_part.elements * precision.weight_bytes(cell.precision)
    return [Term(f"parameters, once in {period} steps: 2 (n-1)/n psi", "all_reduce", parameter_bytes, cell.dp, 1 / period)]


def divide_worker(cell: Cell, parameter_count: int) -> Division:
    """What a worker holds. It flattens the gradient that it pushes and the parameters that it pulls; servers update on the
    CPU."""
    buffer_bytes = precision.weight_bytes(cell.precision)
    return msgspec.structs.replace(divide_by_cuts(cell), optimizer_ranks=0, buffer_bytes=buffer_bytes)


def list_worker_terms(cell: Cell, model_part: ModelPart, *, waits: bool) -> list[Term]:
    """What a worker sends to the parameter servers in a step. waits: whether servers wait for all workers, which then skip a
    step together."""
    gradient_bytes = model_part.elements * precision.weight_bytes(cell.precision)
    gradient_term = Term("the gradient, a slice to each server: psi", "send", gradient_bytes, cell.world_size)
    return [gradient_term, *list_overflow_terms(cell.precision, cell.gpus if waits else 1)]


def make_pull_term(cell: Cell, size: float) -> Term:
    """What servers send in a step, as the mean over the steps between two pulls. size: bytes of the parameters that they
    store."""
    pulls_per_step = cell.gpus / AsynchronousOptions(cell.options).pull_interval
    return Term("the share of the parameters, to every worker that pulls", "send", size, cell.world_size, pulls_per_step)
