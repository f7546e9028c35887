"""Predicts a run of a cell: memory, whether it fits, time, GPU hours, energy, cost and bottleneck, as far as they are known."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from jobs.planner import fit, memory, model_facts
from jobs.planner.machine import NO_GPU, PlannedMachine
from shardlab.cell import Cell
from shardlab.prediction import PredictedRange, Prediction, exactly

GIB = 1 << 30
CPU_RANKS = "ranks are processes on a CPU: tensors by formula, without the memory of the process"


def of(cell: Cell, machine: PlannedMachine) -> Prediction:
    """The prediction of one run. The ranks of the launcher fork compute on the CPU whatever the machine has."""
    if cell.launcher == "fork":
        machine = NO_GPU
    facts = model_facts.of(cell)
    needed = memory.of(cell, on_gpu=machine.on_gpu)
    capacity = capacity_of(cell, machine)
    return Prediction(
        memory_bytes=needed.bytes,
        memory_by_category=needed.by_category,
        capacity_bytes=capacity,
        fits=fit.verdict(needed.bytes, capacity, complete=needed.complete) if capacity is not None else None,
        largest_micro_batch=fit.largest_micro_batch(cell, capacity, on_gpu=machine.on_gpu) if capacity is not None else None,
        how=f"memory: {facts.how}" if machine.on_gpu else f"{CPU_RANKS}; {facts.how}",
    )


def capacity_of(cell: Cell, machine: PlannedMachine) -> PredictedRange | None:
    """The memory that a rank may use. The limit of the cell, memory_limit_gib, is of a rank's GPU only if it has one: on the
    host it limits the whole process, whose memory is not predicted."""
    if not machine.on_gpu:
        return None
    limit = None if cell.memory_limit_gib is None else exactly(cell.memory_limit_gib * GIB)
    if limit is None or machine.capacity is None:
        return limit or machine.capacity
    return PredictedRange(*(min(pair) for pair in zip(_ends(limit), _ends(machine.capacity), strict=True)))


def _ends(span: PredictedRange) -> tuple[float, float, float]:
    return span.low, span.likely, span.high


def of_cells(cells: Mapping[str, Cell], machines: Mapping[str | None, PlannedMachine]) -> dict[str, Prediction]:
    """The predictions of cells, by name. machines: by gpu_type."""
    return {name: of(cell, machines[cell.gpu_type]) for name, cell in cells.items()}


def that_do_not_fit(cells: Mapping[str, Cell], predictions: Mapping[str, Prediction]) -> list[str]:
    """The names of cells that certainly do not fit. Cells that expect `oom` are not among them: out of memory is their result."""
    return [name for name, found in predictions.items() if found.fits == "no" and "oom" not in cells[name].expect]


def encoded(prediction: Prediction) -> dict[str, object]:
    """A prediction for JSON."""
    found: dict[str, object] = msgspec.to_builtins(prediction)
    return found
