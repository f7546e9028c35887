"""Extrapolates a cell to other numbers of GPUs with the same batch per GPU (weak scaling), and rates the trust in the
result."""

from __future__ import annotations

import math

import msgspec

from jobs.planner import predict
from jobs.planner.calibration import NO_CALIBRATION, Calibration
from jobs.planner.machine import PlannedMachine
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import PredictedRange, Prediction
from shardlab.terminal.notation import format_amount
from trainers import menu

# relative width added to each side of a range per doubling of the GPUs; assumed, for contention and stragglers
WIDENING_PER_DOUBLING = 0.05


class ScaledCell(msgspec.Struct, frozen=True):
    """A cell on another number of GPUs."""

    gpus: int
    """Number of GPUs."""
    predicted: Prediction
    """The prediction for a run on this number of GPUs."""
    step_s: PredictedRange | None
    """The seconds of an optimizer step; null: not known."""
    speedup: PredictedRange | None
    """The throughput of this cell divided by the throughput of the original cell."""
    trust: str
    """How far to trust the numbers, as text."""


def scale_cell(cell: Cell, gpus: int, gpus_per_node: int) -> Cell | None:
    """The cell on `gpus` GPUs, with another value of dp; None if tp x pp does not divide `gpus`, if the cell has no data
    parallelism that could grow, or if it has parameter servers. gpus_per_node: the number of GPUs of a node."""
    ranks_per_replica = cell.tp * cell.pp
    if gpus % ranks_per_replica or (cell.dp == 1 and ranks_per_replica > 1) or cell.servers:
        return None
    dp = gpus // ranks_per_replica
    return msgspec.structs.replace(
        cell, gpus=gpus, dp=dp, nnodes=-(-gpus // gpus_per_node), global_batch_size=dp * cell.gpu_batch_size
    )


def extrapolate_to_gpus(
    cell: Cell, gpus: int, gpus_per_node: int, machine: PlannedMachine, calibration: Calibration = NO_CALIBRATION
) -> ScaledCell | None:
    """The prediction for the cell on `gpus` GPUs; None if the cell cannot run on this number (see `scale_cell`), or if its
    strategy or workload refuses it."""
    scaled_cell = scale_cell(cell, gpus, gpus_per_node)
    if scaled_cell is None or menu.refuse(scaled_cell) is not None:
        return None
    base_prediction = predict.predict_run(cell, machine, calibration=calibration)
    scaled_prediction = predict.predict_run(scaled_cell, machine, calibration=calibration)
    doublings = abs(math.log2(gpus / cell.gpus))
    step_s = None if scaled_prediction.step_s is None else _widen_range(scaled_prediction.step_s, doublings)
    speedup = None
    if base_prediction.step_s is not None and step_s is not None:
        # Errors that both predictions have in common cancel out in the ratio, so its range is only the error of extrapolation.
        likely_speedup = gpus / cell.gpus * base_prediction.step_s.likely / step_s.likely
        speedup = PredictedRange(
            likely_speedup * (1 - WIDENING_PER_DOUBLING) ** doublings,
            likely_speedup,
            min(gpus / cell.gpus, likely_speedup * (1 + WIDENING_PER_DOUBLING) ** doublings),
        )
        speedup = PredictedRange(speedup.low, min(speedup.likely, speedup.high), speedup.high)
    trust = _rate_trust(cell, scaled_cell, doublings, is_measured="calibrated" in scaled_prediction.how)
    return ScaledCell(gpus, scaled_prediction, step_s, speedup, trust)


def _widen_range(predicted: PredictedRange, doublings: float) -> PredictedRange:
    return PredictedRange(
        predicted.low * (1 - WIDENING_PER_DOUBLING) ** doublings,
        predicted.likely,
        predicted.high * (1 + WIDENING_PER_DOUBLING) ** doublings,
    )


def _rate_trust(cell: Cell, scaled_cell: Cell, doublings: float, *, is_measured: bool) -> str:
    basis_clause = "from measured runs" if is_measured else "by formula alone, no run of this workload was measured here"
    if scaled_cell.nnodes > 1 and cell.nnodes == 1:
        return f"little: {basis_clause}; the original has one node, so the network between nodes was never in a measurement"
    if doublings <= 1:
        return f"good: {basis_clause}; at most twice as many GPUs"
    return f"{'fair' if doublings <= 3 else 'little'}: {basis_clause}; {format_amount(2**doublings)} times as many GPUs"
