"""Predicts a run of a cell: memory, whether it fits, time, GPU hours, energy, cost and bottleneck, as far as they are known."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from jobs.planner import exchanges, fit, memory, model_facts, rehearsed_step, run_time, step_time
from jobs.planner.calibration import LEAST_SPREAD, NOTHING, Calibration
from jobs.planner.machine import NO_GPU, PlannedMachine
from shardlab.cell import Cell
from shardlab.prediction import PredictedExchange, PredictedRange, Prediction, Source, exactly, total
from shardlab.rehearsed import Answer, NotRehearsed, Rehearsed, RehearsedCollective

GIB = 1 << 30
CPU_RANKS = "ranks are processes on a CPU, so neither their whole memory nor their time is predicted"

OWN_STRATEGY = "no formula describes a strategy of the workspace"
OWN_OPTIONS = "the size of a model of the workspace is known only with its default options"


def of(
    cell: Cell,
    machine: PlannedMachine,
    *,
    calibration: Calibration = NOTHING,
    occupied: int | None = None,
    recorded_s: float | None = None,
    answer: Answer | None = None,
) -> Prediction:
    """The prediction of one run.

    calibration: the measurements of earlier runs. occupied: the number of GPUs that nobody else can use during the run; None:
    only the GPUs on which the run trains. recorded_s: the mean time of earlier runs of the same cell. answer: the result of a
    rehearsal of the cell, which replaces the formula for memory and traffic; None: there is no rehearsal. Ranks of the launcher
    fork always compute on the CPU.
    """
    if cell.launcher == "fork":
        machine = NO_GPU
    capacity = capacity_of(cell, machine)
    if cell.strategy_code is not None or not model_facts.are_known(cell):
        return _without_formula(cell, machine, capacity, recorded_s, answer)
    needed = memory.of(cell, on_gpu=machine.on_gpu)
    found = _memory(cell, machine, needed, calibration, answer)
    sent, sent_from, collectives = _traffic(cell, answer)
    step = step_time.of(cell, machine)
    step_s, of_time = (None, "") if step is None else calibration.time(cell, machine.name, step.seconds)
    power_w, of_energy = run_time.assumed_power(machine.gpu), ""
    if power_w is not None:
        power_w, of_energy = calibration.power(cell, machine.name, power_w)
    run = None if step_s is None else run_time.of(cell, step_s, power_w)
    if recorded_s is not None:
        run = run_time.with_energy(cell, around(recorded_s), power_w)
    gpus = (cell.gpus if occupied is None else occupied) if machine.on_gpu else 0
    gpu_hours = run.time_s.times(gpus / 3600) if run is not None and gpus else None
    how = [found.how]
    if not machine.on_gpu:
        how.append(CPU_RANKS)
    elif step is None:
        how.append(f"time: not known ({_why_no_time(cell, machine)})")
    else:
        how.append(f"time: alpha-beta model and achieved share of the peak{of_time}")
        how += [f"link: {link.name} {link.how}" for link in step.links]
    if of_energy:
        how.append(f"energy: power of the GPUs{of_energy}")
    if recorded_s is not None:
        how.append("run time: mean of earlier runs of this cell")
    return Prediction(
        memory_bytes=found.bytes,
        memory_by_category=found.by_category,
        tensor_bytes=found.tensors,
        memory_from=found.source,
        capacity_bytes=capacity,
        fits=fit.verdict(found.bytes, capacity, complete=found.complete) if capacity is not None else None,
        largest_micro_batch=_largest_micro_batch(cell, machine, capacity, needed, found),
        step_s=step_s,
        step_parts_s={} if step is None else {name: part.likely for name, part in step.parts.items() if part.likely},
        time_s=None if run is None else run.time_s,
        gpu_hours=gpu_hours,
        energy_kwh=None if run is None or not machine.on_gpu else run.energy_kwh,
        cost=None if gpu_hours is None or machine.price is None else gpu_hours.times(machine.price),
        sent_bytes=sent,
        sent_from=sent_from,
        collectives=collectives,
        exchanges=_exchanges(cell),
        bottleneck=None if step is None else step.bottleneck,
        how="; ".join(how),
        gpu=machine.name or None,
        formula_step_s=None if step is None else step.seconds.likely,
        formula_tensor_bytes=needed.tensors.likely if needed.complete else None,
    )


def around(mean: float) -> PredictedRange:
    """A range around the mean of earlier runs, in the unit of `mean`. It is as wide as the narrowest range of a calibration."""
    return PredictedRange(mean * (1 - LEAST_SPREAD), mean, mean * (1 + LEAST_SPREAD))


class _Memory(msgspec.Struct, frozen=True):
    """The predicted memory of a step. tensors: the part that torch's allocator counts. complete: false if the memory is only a
    lower bound."""

    by_category: dict[str, PredictedRange]
    tensors: PredictedRange
    complete: bool
    source: Source
    how: str

    @property
    def bytes(self) -> PredictedRange:
        return self.tensors + total({name: term for name, term in self.by_category.items() if name in memory.BESIDE})


def _memory(
    cell: Cell, machine: PlannedMachine, needed: memory.StepMemoryTerms, calibration: Calibration, answer: Answer | None
) -> _Memory:
    """Predict the memory of a rank: from the rehearsal of a step if there is one, else from the formula.

    needed: the terms of the formula. answer: the rehearsal, or why there is none.
    """
    if isinstance(answer, Rehearsed):
        return _rehearsed(cell, machine, answer)
    tensors, corrected = calibration.memory(cell, machine.name, needed.tensors)
    refused = f", not rehearsed: {answer.why.rstrip('.')}" if isinstance(answer, NotRehearsed) else ""
    how = f"memory: {model_facts.of(cell).how}{corrected}{refused}"
    return _Memory(needed.by_category, tensors, needed.complete, "formula", how)


def _rehearsed(cell: Cell, machine: PlannedMachine, answer: Rehearsed) -> _Memory:
    by_category = rehearsed_step.by_category(cell, answer, on_gpu=machine.on_gpu)
    tensors = total({name: term for name, term in by_category.items() if name not in memory.BESIDE})
    how = f"memory and traffic: {rehearsed_step.in_words(answer, on_gpu=machine.on_gpu)}"
    return _Memory(by_category, tensors, True, "rehearsal", how)


def _traffic(cell: Cell, answer: Answer | None) -> tuple[float | None, Source | None, tuple[RehearsedCollective, ...]]:
    """The traffic of the rank that sends most, in a step: (bytes that it sends, `rehearsal` or `formula`, its collectives if
    they were rehearsed)."""
    if isinstance(answer, Rehearsed) and (rank := rehearsed_step.busiest(answer)) is not None:
        return rehearsed_step.sent_bytes(rank), "rehearsal", rank.collectives or ()
    sent = None if cell.strategy_code is not None else exchanges.sent_bytes(cell)
    return sent, None if sent is None else "formula", ()


def _exchanges(cell: Cell) -> tuple[PredictedExchange, ...] | None:
    """The exchanges of the cell's strategy by formula, in the form of a prediction; None if they are not known."""
    found = exchanges.of(cell)
    return None if found is None else tuple(PredictedExchange(one.op, one.sent_bytes, one.calls, one.ranks) for one in found)


def _largest_micro_batch(
    cell: Cell, machine: PlannedMachine, capacity: PredictedRange | None, needed: memory.StepMemoryTerms, found: _Memory
) -> int | None:
    """The largest micro-batch that is likely to fit, by the formula; None if it is not known. The formula is scaled so that it
    gives the memory `found` for the micro-batch of the cell."""
    if capacity is None:
        return None
    ratio = found.bytes.likely / needed.bytes.likely if found.source == "rehearsal" else 1.0
    return fit.largest_micro_batch(cell, capacity, on_gpu=machine.on_gpu, ratio=ratio)


def _without_formula(
    cell: Cell, machine: PlannedMachine, capacity: PredictedRange | None, recorded_s: float | None, answer: Answer | None
) -> Prediction:
    """The prediction for a strategy of the workspace, or for a model whose size is not known. No formula describes them, so
    the memory is known only from a rehearsal."""
    why = OWN_STRATEGY if cell.strategy_code is not None else OWN_OPTIONS
    time_s = None if recorded_s is None else around(recorded_s)
    if not isinstance(answer, Rehearsed):
        refused = f"; not rehearsed: {answer.why}" if isinstance(answer, NotRehearsed) else ""
        return Prediction(time_s=time_s, how=f"memory and time: not predicted, because {why}{refused}")
    found, (sent, sent_from, collectives) = _rehearsed(cell, machine, answer), _traffic(cell, answer)
    return Prediction(
        memory_bytes=found.bytes,
        memory_by_category=found.by_category,
        tensor_bytes=found.tensors,
        memory_from=found.source,
        capacity_bytes=capacity,
        fits=fit.verdict(found.bytes, capacity, complete=True) if capacity is not None else None,
        time_s=time_s,
        sent_bytes=sent,
        sent_from=sent_from,
        collectives=collectives,
        how=f"{found.how}; time: not predicted, because {why}",
        gpu=machine.name or None,
    )


def _why_no_time(cell: Cell, machine: PlannedMachine) -> str:
    """Why no time is predicted: a clause that names the first value that is missing."""
    if machine.gpu is None:
        return f"shardlab/gpu_models.yaml does not list the GPU {machine.name or 'of this cluster; set gpus.type'}"
    if model_facts.of(cell).flops_per_item is None:
        return "the operations of the model are not known"
    if (exchanged := exchanges.of(cell)) is None:
        return f"what {cell.strategy} exchanges is not known to the planner"
    if any(step_time.over(cell, exchange.axis, machine) is None for exchange in exchanged):
        return "the link between nodes is not known; set network.between_nodes in the cluster file"
    return f"the data sheet has no peak for {cell.precision}"


def capacity_of(cell: Cell, machine: PlannedMachine) -> PredictedRange | None:
    """The memory of a GPU that a rank may use; None if ranks have no GPUs, or if the memory is not known. The key
    memory_limit_gib of the cell lowers this memory. Without GPUs, the key limits the whole process, whose memory is not
    predicted."""
    if not machine.on_gpu:
        return None
    limit = None if cell.memory_limit_gib is None else exactly(cell.memory_limit_gib * GIB)
    if limit is None or machine.capacity is None:
        return limit or machine.capacity
    pairs = zip(run_time.ends(limit), run_time.ends(machine.capacity), strict=True)
    return PredictedRange(*(min(pair) for pair in pairs))


def that_do_not_fit(cells: Mapping[str, Cell], predictions: Mapping[str, Prediction]) -> list[str]:
    """The names of the cells that certainly do not fit the memory. Cells that list `oom` in `expect` are left out, because out
    of memory is the result that they test."""
    return [name for name, found in predictions.items() if found.fits == "no" and "oom" not in cells[name].expect]
