"""Compares the weights of a matrix's cells whose command told checksums of them (`shardlab.steps.checksum`).

The cells of a group differ only in how the ranks share the work. Each is compared with the cell of one process. A cell is only
proven to do the same work if its weights were equal before the first step and have moved alike until a later step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from collect.reading.load import LoadedCell
from shardlab.matrix.cell import Role, find_role_keys
from shardlab.runs.checksums import PROJECTIONS, ModelChecksum
from shardlab.runs.record import SameWork, read_records
from shardlab.runs.rundir import RunDir

# Keys that may differ between the cells of a group. The command line differs in the values of these keys only, because its
# other words are those of one workload of the matrix.
_MAY_DIFFER_KEYS = {"command"} | find_role_keys(
    Role.STRATEGY, Role.EXECUTION, Role.RANKS, Role.PASSES, Role.NODES, Role.START, Role.LENGTH, Role.INSTRUMENTS,
    Role.BOOKKEEPING,
)  # fmt: skip
# The allowed L2 distance of the weights, relative to the distance that they moved in one process; by the type of the weights.
# As our own proof allows for weights of these types (trainers/proof/proof.py). Equal work in float32 was seen to differ by 2e-7
# after 3 steps of SGD or AdamW.
TOLERANCE_BY_DTYPE = {"float32": 1e-3, "float64": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
# A larger distance is another computation. Between the two, it may be the rounding of a precision that the script chose and
# shardlab does not know.
MIN_DIFFERENT_DISTANCE = 2e-1
MAX_START_DISTANCE = 1e-3  # of the weights before the first step, relative to the distance that they move

Verdict = Literal["proven", "different", "not proven"]


class _ParameterSums(msgspec.Struct):
    """The checksum of a whole parameter after a step."""

    numel: int
    dtype: str
    weight: Any
    gradient: Any
    """None: a rank no longer had it."""
    replica_distance: float = 0.0
    """Mean square of the difference between the checksums of two ranks that hold the same block."""


_ModelSums = dict[str, _ParameterSums]


class _Unusable(Exception):
    """Why checksums cannot be compared."""


def judge_same_work(cells: Sequence[LoadedCell]) -> dict[str, SameWork]:
    """Whether the cells of commands do the same work, by the ids of the cells whose first completed run told checksums."""
    groups: dict[bytes, list[tuple[LoadedCell, list[ModelChecksum]]]] = {}
    for cell in cells:
        if cell.cell.command is None or not cell.completed_runs:
            continue
        if checksums := _read_checksums(cell.completed_runs[0].folder):
            shared_values = {key: value for key, value in msgspec.to_builtins(cell.cell).items() if key not in _MAY_DIFFER_KEYS}
            groups.setdefault(msgspec.json.encode(shared_values, order="deterministic"), []).append((cell, checksums))
    verdicts = {}
    for comparable_cells in groups.values():
        reference = next((cell_entry for cell_entry in comparable_cells if cell_entry[1][0].world_size == 1), None)
        for cell, checksums in comparable_cells:
            verdicts[cell.id] = _judge_cell(checksums, reference, is_reference=reference is not None and cell is reference[0])
    return verdicts


def _read_checksums(run_dir: RunDir) -> list[ModelChecksum]:
    """The checksums of all ranks. The first record says how many ranks there were."""
    checksums = read_records(run_dir.checksums_file(0), ModelChecksum).records
    for rank in range(1, min(checksums[0].world_size, 1 << 20) if checksums else 0):
        rank_checksums = read_records(run_dir.checksums_file(rank), ModelChecksum).records
        if not rank_checksums:
            break
        checksums += rank_checksums
    return checksums


def _judge_cell(
    checksums: list[ModelChecksum], reference: tuple[LoadedCell, list[ModelChecksum]] | None, *, is_reference: bool
) -> SameWork:
    """The verdict about a cell. is_reference: whether the cell itself is the one process that others are compared with."""
    try:
        model_by_step = _sum_models(checksums)
        if reference is None:
            raise _Unusable("no cell of one process told checksums, with which this cell could be compared")
        reference_by_step = model_by_step if is_reference else _sum_models(reference[1])
        shared_steps = sorted(model_by_step.keys() & reference_by_step.keys())
        if len(shared_steps) < 2 or shared_steps[0] != 0:
            raise _Unusable("checksums before the first step and after a later step are needed, of the same steps in both")
        comparison_name = "one process, to which other cells are compared" if is_reference else f"compared to {reference[0].id}"
        return _compare_models(model_by_step, reference_by_step, shared_steps, comparison_name, checksums[0].optimizer)
    except _Unusable as reason:
        return SameWork(verdict="not proven", why=f"checksums of weights: {reason}")


def _sum_models(checksums: Iterable[ModelChecksum]) -> dict[int, _ModelSums]:
    """The checksums of whole models by step: the sums over the blocks of all ranks. Raises _Unusable if a block is missing."""
    checksums_by_step: dict[int, list[ModelChecksum]] = {}
    for checksum in checksums:
        checksums_by_step.setdefault(checksum.step, []).append(checksum)
    return {step: _sum_blocks(step, step_checksums) for step, step_checksums in checksums_by_step.items()}


def _sum_blocks(step: int, checksums: list[ModelChecksum]) -> _ModelSums:
    recorded_ranks = {checksum.rank for checksum in checksums}
    if len(recorded_ranks) < checksums[0].world_size:
        raise _Unusable(f"those of step {step} are there for {len(recorded_ranks)} of {checksums[0].world_size} ranks")
    model: _ModelSums = {}
    weight_by_block: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Any] = {}
    for checksum in checksums:
        for parameter, unseen_reason in checksum.unseen.items():
            raise _Unusable(f"{parameter} is not seen, because {unseen_reason!r}")
        for piece in checksum.pieces:
            weight = np.array(piece.weight)
            gradient = None if piece.gradient is None else np.array(piece.gradient)
            sums = model.setdefault(piece.name, _ParameterSums(math.prod(piece.shape), piece.dtype, np.zeros(PROJECTIONS), 0.0))
            block_key = (piece.name, tuple(piece.offsets), tuple(piece.block))
            if block_key in weight_by_block:  # a replica of another rank's block, which must be equal
                replica_distance = float(np.square(weight - weight_by_block[block_key]).mean())
                sums.replica_distance = max(sums.replica_distance, replica_distance)
                continue
            weight_by_block[block_key] = weight
            sums.weight = sums.weight + weight
            sums.gradient = None if gradient is None or sums.gradient is None else sums.gradient + gradient
    for parameter, sums in model.items():
        known_elements = sum(math.prod(size) for block_name, _, size in weight_by_block if block_name == parameter)
        if known_elements != sums.numel:
            raise _Unusable(f"of {parameter}, {known_elements} of {sums.numel} elements are seen after step {step}")
    return model


def _compare_models(
    models: dict[int, _ModelSums], others: dict[int, _ModelSums], steps: list[int], name: str, optimizer: str | None
) -> SameWork:
    """Compare the models of a cell with those of one process. name: of the comparison, in words."""
    start_model, other_start = models[0], others[0]
    for step in steps:
        for unmatched in sorted((models[step].keys() ^ other_start.keys()) | (others[step].keys() ^ other_start.keys())):
            raise _Unusable(f"of the models that are compared, not all have the parameter {unmatched}")
    for parameter, parameter_sums in start_model.items():
        reference_sums = other_start[parameter]
        if parameter_sums.dtype != reference_sums.dtype:
            raise _Unusable(f"{parameter} is {parameter_sums.dtype} here and {reference_sums.dtype} in one process")
        if parameter_sums.numel != reference_sums.numel:
            return SameWork(verdict="different", why=f"checksums of weights, {name}: {parameter} has another size")
    moved_distance = math.sqrt(
        sum(float(np.square(others[steps[-1]][key].weight - other_start[key].weight).mean()) for key in other_start)
    )
    if moved_distance == 0:
        raise _Unusable(f"the weights of one process did not move from step 0 to step {steps[-1]}")
    start_distance, start_worst_parameter = _measure_weight_distance(start_model, other_start, moved_distance)
    tolerance = max(TOLERANCE_BY_DTYPE.get(parameter_sums.dtype, 0.0) for parameter_sums in start_model.values())
    distances_by_step = [(*_measure_weight_distance(models[step], others[step], moved_distance), step) for step in steps[1:]]
    distance, worst_parameter, step = max(distances_by_step)
    if start_distance > MAX_START_DISTANCE:
        distance, worst_parameter, step = start_distance, start_worst_parameter, 0
    gradient_distance = _measure_gradient_distance(models[steps[-1]], others[steps[-1]])
    largest_distance = max(distance, gradient_distance or 0.0)
    if step == 0 or largest_distance > MIN_DIFFERENT_DISTANCE:
        verdict: Verdict = "different"
    else:
        verdict = "proven" if largest_distance <= tolerance else "not proven"
    clauses = [f"after step {step} of steps 0 to {steps[-1]}, they differ by {distance:.1e} of their movement"]
    clauses[0] += f" (allowed {tolerance:.0e})" + (f", most in {worst_parameter}" if distance > 0 else "")
    if gradient_distance is None:
        clauses.append(
            "gradients: not seen, so a wrong scale of them that the optimizer hides, as Adam does, is not seen either"
        )
    else:
        clauses.append(f"gradients after step {steps[-1]} differ by {gradient_distance:.1e} of their norm")
    if verdict == "not proven":
        clauses.append("the difference may be the rounding of a lower precision in the script")
    clauses.append(f"optimizer: {optimizer or 'not known'}")
    return SameWork(
        verdict=verdict, why=f"checksums of weights, {name}: {'; '.join(clauses)}", parameter_difference=min(distance, 1e150)
    )


def _measure_weight_distance(model: _ModelSums, reference_model: _ModelSums, moved_distance: float) -> tuple[float, str]:
    """Returns (the L2 distance of two models, relative to `moved_distance`; the parameter with most of it). Where two ranks of
    the first model differ more than the models, that distance counts.

    Infinite if a number is not finite.
    """
    square_by_parameter = {
        parameter: max(float(np.square(sums.weight - reference_model[parameter].weight).mean()), sums.replica_distance)
        for parameter, sums in model.items()
    }
    worst_parameter = max(square_by_parameter, key=lambda parameter: square_by_parameter[parameter])
    relative_distance = math.sqrt(sum(square_by_parameter.values())) / moved_distance
    return (relative_distance if math.isfinite(relative_distance) else math.inf), worst_parameter


def _measure_gradient_distance(model: _ModelSums, reference_model: _ModelSums) -> float | None:
    """The L2 distance of the gradients, relative to the norm of those of `reference_model`; None if a library no longer has
    them."""
    pairs = [(sums.gradient, reference_model[name].gradient) for name, sums in model.items()]
    if any(gradient is None for gradient_pair in pairs for gradient in gradient_pair):
        return None
    reference_norm = math.sqrt(sum(float(np.square(reference_gradient).mean()) for _, reference_gradient in pairs))
    distance = math.sqrt(sum(float(np.square(gradient - reference_gradient).mean()) for gradient, reference_gradient in pairs))
    return distance / reference_norm if reference_norm > 0 and math.isfinite(distance) else math.inf if distance else 0.0
