"""Local SGD: each rank trains a whole model on its own items, and every few steps the ranks average their parameters.

The optimizer state of each rank stays its own, and so do buffers. This is the rule of torch's PostLocalSGDOptimizer without its
warm-up (Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018). Study 5 calls averages after each step parameter
averaging.
"""

from __future__ import annotations

from shardlab.matrix.cell import Cell
from trainers.model.precision import ALL, scales_loss
from trainers.strategy import SWITCHES, Strategy
from trainers.strategy_options import LocalSgdOptions
from trainers.theory.whole_models import get_averaging_period, list_averaging_terms


def explain_other_work(cell: Cell) -> str | None:
    """Why a cell does other work than one process; None for one rank, and for plain SGD with an average after each step: the
    mean of the updated parameters is then the update by the mean gradient."""
    if cell.gpus == 1:
        return None
    if (period := get_averaging_period(cell)) > 1:
        return f"each rank trains alone between two averages of the parameters, which are {period} steps apart"
    if cell.optimizer.name != "sgd" or cell.max_grad_norm is not None:
        changed_by = "clips" if cell.optimizer.name == "sgd" else f"applies {cell.optimizer.name} to"
        return f"each rank {changed_by} the gradients of its own items, and only the updated parameters are averaged"
    return None


VARIANTS = (
    Strategy(
        name="local-sgd",
        summary="a whole model on every rank, trained alone; parameters averaged by all-reduce every few steps (local SGD)",
        precisions=tuple(name for name in ALL if not scales_loss(name)),
        reasons=dict.fromkeys(filter(scales_loss, ALL), "each rank would have a loss scale of its own"),
        refuse=lambda _: None,
        engine="trainers.engines.local_sgd",
        switches=SWITCHES,
        cuts=(),
        theory_of_communication=list_averaging_terms,
        options=LocalSgdOptions.list_options(),
        other_work=explain_other_work,
        communication_period=get_averaging_period,
    ),
)
