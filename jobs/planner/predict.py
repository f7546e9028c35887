"""Predicts a run of a cell: memory, whether it fits, time, GPU hours, energy, cost and bottleneck, as far as they are known.

Which share of a GPU's memory counts as usable: `usable` in jobs/planner/terms.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from jobs.planner import exchanges, host_memory, memory, model_facts, step_time
from jobs.planner.calibration import LEAST_RATIO_SPREAD, NO_CALIBRATION, Calibration
from jobs.planner.machine import NO_GPU_MACHINE, PlannedMachine
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import (
    FitVerdict,
    PredictedExchange,
    PredictedRange,
    Prediction,
    PredictionSource,
    make_exact_range,
    sum_ranges,
)
from shardlab.runs.rehearsed import NotRehearsed, RehearsalAnswer, Rehearsed, RehearsedCollective, RehearsedRank
from trainers.theory.term import FACTORS

GIB = 1 << 30
CPU_RANKS_REASON = "ranks are processes on a CPU, whose time is not predicted"

OWN_STRATEGY_REASON = "no formula describes a strategy of the workspace"
OWN_OPTIONS_REASON = "the size of a model of the workspace is known only with its default options"
LARGEST_MICRO_BATCH = 1 << 20  # the largest micro-batch that is considered
UNMEASURED_ERROR_PCT = 8.0  # the error of a rehearsal whose error was never measured; the limit that the tests allow
STARTUP_S = PredictedRange(15.0, 45.0, 240.0)  # seconds before the first step: imports, NCCL, model, same-work proof; assumed
POWER_SHARE = PredictedRange(0.45, 0.75, 1.0)  # share of a board's largest power while it trains; assumed
# the number of images in the official training split
DATA_SET_ITEMS = {"cifar10": 50_000, "mnist": 60_000, "imagenet": 1_281_167}


class PredictedRunTime(msgspec.Struct, frozen=True):
    """The predicted time of a whole run in seconds, and the energy of its GPUs in kWh (None if their power is not known)."""

    time_s: PredictedRange
    energy_kwh: PredictedRange | None


def predict_run(
    cell: Cell,
    machine: PlannedMachine,
    *,
    calibration: Calibration = NO_CALIBRATION,
    occupied_gpus: int | None = None,
    recorded_s: float | None = None,
    rehearsal: RehearsalAnswer | None = None,
    node_bytes: float | None = None,
) -> Prediction:
    """The prediction of one run.

    calibration: the measurements of earlier runs. occupied_gpus: the number of GPUs that nobody else can use during the run;
    None: only the GPUs on which the run trains. recorded_s: the mean time of earlier runs of the same cell. rehearsal: the
    result of a rehearsal of the cell, which replaces the formula for memory and traffic; None: there is no rehearsal.
    node_bytes: the memory of a node; None: not known. Ranks of the launcher fork always compute on the CPU.
    """
    machine = NO_GPU_MACHINE if cell.launcher == "fork" else machine
    capacity = find_gpu_capacity(cell, machine)
    if cell.strategy_code is not None or not model_facts.are_facts_known(cell):
        return _predict_without_formula(cell, machine, capacity, recorded_s, rehearsal)
    formula_memory = memory.predict_memory(cell, on_gpu=machine.on_gpu)
    run_memory = _predict_memory(cell, machine, formula_memory, calibration, rehearsal)
    sent_bytes, sent_from, collectives = _predict_traffic(cell, rehearsal)
    step = step_time.predict_step_time(cell, machine)
    tensor_bytes = run_memory.bytes_by_category
    host_bytes = host_memory.predict_host_bytes(cell, node_bytes, on_gpu=machine.on_gpu, tensors_by_category=tensor_bytes)
    step_s, time_note = (None, "") if step is None else calibration.correct_time(cell, machine.gpu_name, step)
    power_w, power_note = _predict_power(cell, machine, calibration)
    run_time = _predict_run_time(cell, step_s, power_w, recorded_s)
    counted_gpus = (cell.gpus if occupied_gpus is None else occupied_gpus) if machine.on_gpu else 0
    gpu_hours = run_time.time_s.times(counted_gpus / 3600) if run_time is not None and counted_gpus else None
    recorded_note = "" if recorded_s is None else "run time: mean of earlier runs of this cell"
    explanations = [run_memory.how, *_explain_step_time(cell, machine, step, time_note), power_note, recorded_note]
    return Prediction(
        memory_bytes=run_memory.total_bytes,
        memory_by_category=tensor_bytes,
        tensor_bytes=run_memory.tensor_bytes,
        memory_from=run_memory.source,
        capacity_bytes=capacity,
        host_bytes=host_bytes,
        host_capacity_bytes=node_bytes,
        fits=judge_fit(run_memory.total_bytes, capacity, is_complete=run_memory.is_complete) if capacity is not None else None,
        largest_micro_batch=_predict_largest_micro_batch(cell, machine, capacity, formula_memory, run_memory),
        step_s=step_s,
        step_parts_s={name: part.likely for name, part in step.parts_s.items() if part.likely} if step else {},
        time_s=None if run_time is None else run_time.time_s,
        gpu_hours=gpu_hours,
        energy_kwh=None if run_time is None or not machine.on_gpu else run_time.energy_kwh,
        cost=None if gpu_hours is None or machine.price_per_gpu_hour is None else gpu_hours.times(machine.price_per_gpu_hour),
        sent_bytes=sent_bytes,
        sent_from=sent_from,
        collectives=collectives,
        exchanges=_predict_exchanges(cell),
        bottleneck=None if step is None else step.bottleneck,
        how="; ".join(filter(None, explanations)),
        gpu=machine.gpu_name or None,
        formula_step_s=None if step is None else step.step_s.likely,
        formula_tensor_bytes=formula_memory.tensor_bytes.likely if formula_memory.is_complete else None,
    )


def make_range_around(mean_value: float) -> PredictedRange:
    """A range around the mean of earlier runs, in the unit of `mean_value`. It is as wide as the narrowest range of a
    calibration."""
    return PredictedRange(mean_value * (1 - LEAST_RATIO_SPREAD), mean_value, mean_value * (1 + LEAST_RATIO_SPREAD))


class _PredictedMemory(msgspec.Struct, frozen=True):
    """The predicted memory of a step."""

    bytes_by_category: dict[str, PredictedRange]
    tensor_bytes: PredictedRange
    """The part that torch's allocator counts."""
    is_complete: bool
    """False if the memory is only a lower bound."""
    source: PredictionSource
    how: str

    @property
    def total_bytes(self) -> PredictedRange:
        return self.tensor_bytes + sum_ranges(
            {name: term for name, term in self.bytes_by_category.items() if name in memory.NON_TENSOR_CATEGORIES}
        )


def _predict_memory(
    cell: Cell,
    machine: PlannedMachine,
    formula_memory: memory.StepMemoryTerms,
    calibration: Calibration,
    rehearsal: RehearsalAnswer | None,
) -> _PredictedMemory:
    """Predict the memory of a rank: from the rehearsal of a step if there is one, else from the formula.

    formula_memory: the terms of the formula. rehearsal: the rehearsal, or why there is none.
    """
    if isinstance(rehearsal, Rehearsed):
        return _predict_memory_by_rehearsal(cell, machine, rehearsal)
    tensor_bytes, correction_note = calibration.correct_memory(cell, machine.gpu_name, formula_memory.tensor_bytes)
    refusal_note = f", not rehearsed: {rehearsal.why.rstrip('.')}" if isinstance(rehearsal, NotRehearsed) else ""
    explanation = f"memory: {model_facts.find_model_facts(cell).saved_bytes_source}{correction_note}{refusal_note}"
    return _PredictedMemory(formula_memory.bytes_by_category, tensor_bytes, formula_memory.is_complete, "formula", explanation)


def _predict_memory_by_rehearsal(cell: Cell, machine: PlannedMachine, rehearsal: Rehearsed) -> _PredictedMemory:
    by_category = _predict_rehearsed_memory(cell, rehearsal, on_gpu=machine.on_gpu)
    tensor_bytes = sum_ranges(
        {
            category: category_bytes
            for category, category_bytes in by_category.items()
            if category not in memory.NON_TENSOR_CATEGORIES
        }
    )
    explanation = f"memory and traffic: {_describe_rehearsal(rehearsal, on_gpu=machine.on_gpu)}"
    return _PredictedMemory(by_category, tensor_bytes, True, "rehearsal", explanation)


def _predict_traffic(
    cell: Cell, rehearsal: RehearsalAnswer | None
) -> tuple[float | None, PredictionSource | None, tuple[RehearsedCollective, ...]]:
    """The traffic of the rank that sends most, in a step: (bytes that it sends, `rehearsal` or `formula`, its collectives if
    they were rehearsed)."""
    if isinstance(rehearsal, Rehearsed) and (rank := _find_busiest_rank(rehearsal)) is not None:
        return _sum_sent_bytes(rank), "rehearsal", rank.collectives or ()
    sent_bytes = None if cell.strategy_code is not None else exchanges.sum_sent_bytes(cell)
    return sent_bytes, None if sent_bytes is None else "formula", ()


def _predict_exchanges(cell: Cell) -> tuple[PredictedExchange, ...] | None:
    """The exchanges of the cell's strategy by formula, in the form of a prediction; None if they are not known."""
    known_exchanges = exchanges.list_exchanges(cell)
    if known_exchanges is None:
        return None
    return tuple(
        PredictedExchange(exchange.op, exchange.sent_bytes, exchange.times * exchange.calls, exchange.ranks)
        for exchange in known_exchanges
    )


def _predict_largest_micro_batch(
    cell: Cell,
    machine: PlannedMachine,
    capacity: PredictedRange | None,
    formula_memory: memory.StepMemoryTerms,
    run_memory: _PredictedMemory,
) -> int | None:
    """The largest micro-batch that is likely to fit, by the formula; None if it is not known. The formula is scaled so that it
    gives the memory `run_memory` for the micro-batch of the cell."""
    if capacity is None:
        return None
    rehearsal_ratio = (
        run_memory.total_bytes.likely / formula_memory.total_bytes.likely if run_memory.source == "rehearsal" else 1.0
    )
    return find_largest_micro_batch(cell, capacity, on_gpu=machine.on_gpu, memory_ratio=rehearsal_ratio)


def _predict_without_formula(
    cell: Cell,
    machine: PlannedMachine,
    capacity: PredictedRange | None,
    recorded_s: float | None,
    rehearsal: RehearsalAnswer | None,
) -> Prediction:
    """The prediction for a strategy of the workspace, or for a model whose size is not known. No formula describes them, so
    the memory is known only from a rehearsal."""
    missing_reason = OWN_STRATEGY_REASON if cell.strategy_code is not None else OWN_OPTIONS_REASON
    time_s = None if recorded_s is None else make_range_around(recorded_s)
    if not isinstance(rehearsal, Rehearsed):
        refusal_note = f"; not rehearsed: {rehearsal.why}" if isinstance(rehearsal, NotRehearsed) else ""
        return Prediction(time_s=time_s, how=f"memory and time: not predicted, because {missing_reason}{refusal_note}")
    predicted_memory = _predict_memory_by_rehearsal(cell, machine, rehearsal)
    sent_bytes, sent_from, collectives = _predict_traffic(cell, rehearsal)
    return Prediction(
        memory_bytes=predicted_memory.total_bytes,
        memory_by_category=predicted_memory.bytes_by_category,
        tensor_bytes=predicted_memory.tensor_bytes,
        memory_from=predicted_memory.source,
        capacity_bytes=capacity,
        fits=judge_fit(predicted_memory.total_bytes, capacity, is_complete=True) if capacity is not None else None,
        time_s=time_s,
        sent_bytes=sent_bytes,
        sent_from=sent_from,
        collectives=collectives,
        how=f"{predicted_memory.how}; time: not predicted, because {missing_reason}",
        gpu=machine.gpu_name or None,
    )


def _explain_step_time(
    cell: Cell, machine: PlannedMachine, step: step_time.PredictedStepTime | None, calibration_note: str
) -> list[str]:
    """Clauses that say how the time of a step was predicted, or why it was not. step: None if the time is not known."""
    if not machine.on_gpu:
        return [CPU_RANKS_REASON]
    if step is None:
        return [f"time: not known ({_explain_no_time(cell, machine)})"]
    explanation = f"time: alpha-beta model and achieved share of the peak{calibration_note}"
    return [explanation, *(f"link: {link.name} {link.how}" for link in step.links)]


def _explain_no_time(cell: Cell, machine: PlannedMachine) -> str:
    """Why no time is predicted: a clause that names the first value that is missing."""
    if machine.gpu_model is None:
        return f"shardlab/hardware/gpu_models.yaml does not list the GPU {machine.gpu_name or 'of this cluster; set gpus.type'}"
    if model_facts.find_model_facts(cell).flops_per_item is None:
        return "the operations of the model are not known"
    if (known_exchanges := exchanges.list_exchanges(cell)) is None:
        return f"what {cell.strategy} exchanges is not known to the planner"
    if any(step_time.find_group_link(cell, exchange.axis, machine) is None for exchange in known_exchanges):
        return "the link between nodes is not known; set network.between_nodes in the cluster file"
    return f"the data sheet has no peak for {cell.precision}"


def find_gpu_capacity(cell: Cell, machine: PlannedMachine) -> PredictedRange | None:
    """The memory of a GPU that a rank may use; None if ranks have no GPUs, or if the memory is not known. The key
    memory_limit_gib of the cell lowers this memory. Without GPUs, the key limits the whole process, whose memory is not
    predicted."""
    if not machine.on_gpu:
        return None
    memory_limit = None if cell.memory_limit_gib is None else make_exact_range(cell.memory_limit_gib * GIB)
    if memory_limit is None or machine.gpu_memory_bytes is None:
        return memory_limit or machine.gpu_memory_bytes
    limit_pairs = zip(msgspec.structs.astuple(memory_limit), msgspec.structs.astuple(machine.gpu_memory_bytes), strict=True)
    return PredictedRange(*(min(limit_pair) for limit_pair in limit_pairs))


def list_names_over_memory(cells: Mapping[str, Cell], predictions: Mapping[str, Prediction]) -> list[str]:
    """The names of the cells that certainly do not fit the memory of a GPU or of a node. Cells that list `oom` in `expect` are
    left out, because out of memory is the result that they test."""
    return [
        name
        for name, prediction in predictions.items()
        if (prediction.fits == "no" or host_memory.exceeds_node(prediction)) and "oom" not in cells[name].expect
    ]


def judge_fit(needed_bytes: PredictedRange, capacity: PredictedRange, *, is_complete: bool) -> FitVerdict | None:
    """Whether the memory that a cell needs fits the memory of a GPU; None if it is not known.

    is_complete: false if the memory of activations is not known. `needed_bytes` is then a lower bound, so the only possible
    answers are `no` and None."""
    if needed_bytes.low > capacity.high:
        return "no"
    if not is_complete:
        return None
    if needed_bytes.high <= capacity.low:
        return "yes"
    return "likely" if needed_bytes.likely <= capacity.likely else "unlikely"


def find_largest_micro_batch(cell: Cell, capacity: PredictedRange, *, on_gpu: bool, memory_ratio: float = 1.0) -> int | None:
    """The largest micro_batch_size that is likely to fit if the number of passes per step stays the same.

    Returns 0 if not even one item fits, and None if the memory of activations is not known.

    For small micro-batches, the memory is constant; for larger micro-batches, activations decide the peak, and the memory grows
    linearly. So a line through the memory of two large micro-batches gives a first result, which is then corrected by the whole
    formula. memory_ratio: the real memory divided by the memory that the formula gives.
    """

    def predict_needed_bytes(micro_batch: int) -> float:
        return memory_ratio * memory.predict_memory(cell, micro_batch=micro_batch, on_gpu=on_gpu).total_bytes.likely

    if not memory.predict_memory(cell, on_gpu=on_gpu).is_complete:
        return None
    if predict_needed_bytes(1) > capacity.likely:
        return 0
    bytes_at_largest = predict_needed_bytes(LARGEST_MICRO_BATCH)
    bytes_per_item = (bytes_at_largest - predict_needed_bytes(LARGEST_MICRO_BATCH // 2)) / (
        LARGEST_MICRO_BATCH - LARGEST_MICRO_BATCH // 2
    )
    if bytes_per_item <= 0 or bytes_at_largest <= capacity.likely:
        return LARGEST_MICRO_BATCH
    micro_batch = max(
        1, min(LARGEST_MICRO_BATCH, math.floor(LARGEST_MICRO_BATCH - (bytes_at_largest - capacity.likely) / bytes_per_item))
    )
    while micro_batch > 1 and predict_needed_bytes(micro_batch) > capacity.likely:
        micro_batch -= 1
    while micro_batch < LARGEST_MICRO_BATCH and predict_needed_bytes(micro_batch + 1) <= capacity.likely:
        micro_batch += 1
    return micro_batch


def _predict_rehearsed_memory(cell: Cell, rehearsal: Rehearsed, *, on_gpu: bool) -> dict[str, PredictedRange]:
    """The bytes of each category at the peak, on the rank that needs most memory. on_gpu: whether ranks have GPUs.

    A rehearsal gives the bytes of tensors exactly as the operators of a CPU allocate them (shardlab/runs/rehearsed.py). On a
    GPU, other operators run; `gpu_operators` in terms.yaml has the range of the difference. A rehearsal does not contain the
    CUDA context, NCCL's buffers and fragmentation, so they are the same terms as in the formula."""
    error_share = (UNMEASURED_ERROR_PCT if rehearsal.error_pct is None else rehearsal.error_pct) / 100
    operator_term = memory.read_memory_terms()["gpu_operators"]
    low_factor, high_factor = (1 + operator_term.low, 1 + operator_term.high) if on_gpu else (1.0, 1.0)
    peak_bytes = msgspec.structs.asdict(rehearsal.worst_rank.at_peak)
    by_category = {
        category: PredictedRange(
            category_bytes * low_factor * (1 - error_share), category_bytes, category_bytes * high_factor * (1 + error_share)
        )
        for category, category_bytes in peak_bytes.items()
        if category_bytes
    }
    return {**by_category, **memory.predict_non_tensor_bytes(cell, sum_ranges(by_category))} if on_gpu else by_category


def _find_busiest_rank(rehearsal: Rehearsed) -> RehearsedRank | None:
    """The rank that sends most bytes; None if the collectives of a rank could not be counted."""
    if any(rank.collectives is None for rank in rehearsal.ranks):
        return None
    return max(rehearsal.ranks, key=_sum_sent_bytes)


def _sum_sent_bytes(rank: RehearsedRank) -> float:
    """The bytes that a rank sends in a step, if every collective uses the ring algorithm."""
    return sum(map(_count_sent_bytes, rank.collectives or ()))


def _count_sent_bytes(collective: RehearsedCollective) -> float:
    return collective.times * collective.payload_bytes * FACTORS[collective.op](collective.ranks)


def _describe_rehearsal(rehearsal: Rehearsed, *, on_gpu: bool) -> str:
    """A clause that says how the rehearsal was made, for the explanation of a prediction."""
    depths_clause = (
        "" if rehearsal.depths is None else f", extrapolated from {rehearsal.depths[0]} and {rehearsal.depths[1]} blocks"
    )
    error_text = "error never measured"
    if rehearsal.error_pct is not None:
        error_text = f"largest measured error {rehearsal.error_pct:g} %, {rehearsal.error_from}"
    gpu_clause = "; operators of a GPU may need other memory, never measured" if on_gpu else ""
    remarks_clause = "".join(f"; {remark.rstrip('.')}" for remark in rehearsal.remarks)
    return (
        f"rehearsed on {rehearsal.how.replace('_', ' ')} of a {rehearsal.device.upper()}{depths_clause} "
        f"({error_text}{gpu_clause}{remarks_clause})"
    )


def _count_steps(cell: Cell) -> int | None:
    """The number of steps of a run, with its warm-up steps; None if the run counts epochs and the length of an epoch is known
    only when the data are read."""
    if cell.steps is not None:
        return cell.steps + cell.warmup_steps
    epoch_items = cell.options.get("subset") or DATA_SET_ITEMS.get(str(cell.options.get("data")))
    if not isinstance(epoch_items, int) or cell.epochs is None:
        return None
    return cell.epochs * max(1, epoch_items // cell.global_batch_size) + cell.warmup_steps


def _predict_power(cell: Cell, machine: PlannedMachine, calibration: Calibration) -> tuple[PredictedRange | None, str]:
    """(the power of a GPU while it trains, in watts, and how earlier runs corrected it, or an empty text). The power is None if
    the largest power of the GPU is not known."""
    if machine.gpu_model is None or machine.gpu_model.power_w is None:
        return None, ""
    power_w, correction_note = calibration.correct_power(cell, machine.gpu_name, POWER_SHARE.times(machine.gpu_model.power_w))
    return power_w, correction_note and f"energy: power of the GPUs{correction_note}"


def _predict_run_time(
    cell: Cell, step_s: PredictedRange | None, power_w: PredictedRange | None, recorded_s: float | None
) -> PredictedRunTime | None:
    """The time and energy of a run; None if the time is not known.

    step_s: the time of a step. power_w: the power of one GPU in watts. recorded_s: the mean time of earlier runs of the cell,
    which replaces the time from the number of steps. Each is None if it is not known.
    """
    if recorded_s is not None:
        time_s = make_range_around(recorded_s)
    elif step_s is not None and (steps := _count_steps(cell)) is not None:
        time_s = STARTUP_S + step_s.times(steps)
    else:
        return None
    if power_w is None:
        return PredictedRunTime(time_s, None)
    time_power_pairs = zip(msgspec.structs.astuple(time_s), msgspec.structs.astuple(power_w), strict=True)
    return PredictedRunTime(
        time_s, PredictedRange(*(seconds / 3600 * cell.gpus * watts / 1000 for seconds, watts in time_power_pairs))
    )
