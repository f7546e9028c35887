"""Ranks strategies for a workload on given GPUs: which fit, with which batch, how fast, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from jobs.planner import gpu, predict, sharding
from jobs.planner.machine import PlannedMachine
from jobs.planner.rules import JudgedRule, judge_rules
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import PredictedRange, Prediction
from shardlab.runs.rehearsed import Answer, Rehearsed
from trainers import menu
from trainers.strategy import Strategy
from trainers.workload import Workload

LARGEST_BATCH = 64  # the largest micro-batch that is considered: a larger one hardly makes a step more efficient
PASSES_PER_STAGE = 4  # micro-batches per pipeline stage: with this rule of study 4, the bubble is below a fifth of the step


class Advice(msgspec.Struct, frozen=True):
    """The advice on one strategy with one choice of its degrees (dp, tp, pp)."""

    cell: Cell
    """Trains with this strategy and the largest micro-batch that fits, or with a micro-batch of one item if none fits."""
    predicted: Prediction
    """The prediction for this cell."""
    items_per_s: float | None
    """The likely throughput of all ranks together; None if the cell does not fit the memory, or if the time of a step is not
    known."""
    reasons: tuple[str, ...]
    """Sentences on what decides the place of the strategy in the ranking."""
    range_per_s: PredictedRange | None = None
    """The range of this throughput."""

    @property
    def fits(self) -> bool:
        """Whether the cell is likely to fit the memory of a GPU."""
        return self.predicted.fits in ("yes", "likely")


class AdviceReport(msgspec.Struct, frozen=True):
    """The result of `jobs advise`: the strategies that fit (the fastest first), the strategies that do not fit, and the rules
    of the studies that apply."""

    ranked: list[Advice]
    rules: list[JudgedRule]


def rank_strategies(
    workload: Workload,
    machine: PlannedMachine,
    gpus: int,
    nodes: int,
    precision: str,
    link: str,
    answers: Callable[[Sequence[Cell]], Mapping[str, Answer]] = lambda _: {},
) -> AdviceReport:
    """Rank all strategies that can train a workload on the given GPUs.

    machine: the GPU model and the links. link: the link between the GPUs, by the name that the studies' rules use, such as
    nvlink. answers: returns the results of the rehearsals of cells, by the name of the cell; each strategy is rehearsed with
    the batch that fits.
    """
    all_advice = [_advise_on_cell(cell, machine) for cell in list_candidate_cells(workload, gpus, nodes, precision)]
    best: dict[tuple[object, ...], Advice] = {}
    for advice in all_advice:  # compare each cell with and without activation checkpointing, and keep the better of the two
        key = (advice.cell.strategy, advice.cell.tp, advice.cell.pp)
        if key not in best or _ranking_key(advice) < _ranking_key(best[key]):
            best[key] = advice
    ranked = sorted(_correct_by_rehearsals(sorted(best.values(), key=_ranking_key), machine, answers), key=_ranking_key)
    throughputs: dict[str, float] = {}
    for advice in ranked:
        if advice.items_per_s is not None:
            throughputs.setdefault(advice.cell.strategy, advice.items_per_s)
    facts = rule_facts(workload, machine, gpus, nodes, precision, link)
    return AdviceReport(ranked, judge_rules(facts, throughputs))


def _correct_by_rehearsals(
    ranked: Sequence[Advice], machine: PlannedMachine, answers: Callable[[Sequence[Cell]], Mapping[str, Answer]]
) -> list[Advice]:
    """The advice, corrected by rehearsals. If a cell does not fit according to its rehearsal, a smaller batch is rehearsed."""
    rehearsals = _select_rehearsed(answers([advice.cell for advice in ranked]))
    corrected = [
        _correct_advice(advice.cell, machine, rehearsals[advice.cell.name()]) if advice.cell.name() in rehearsals else advice
        for advice in ranked
    ]
    smaller = {
        advice.cell.name(): _with_batch(advice.cell, advice.predicted.largest_micro_batch)
        for advice in corrected
        if not advice.fits and advice.predicted.memory_from == "rehearsal" and advice.predicted.largest_micro_batch
    }
    rehearsals = _select_rehearsed(answers(list(smaller.values()))) if smaller else {}
    return [
        advice
        if (cell := smaller.get(advice.cell.name())) is None or cell.name() not in rehearsals
        else _correct_advice(cell, machine, rehearsals[cell.name()])
        for advice in corrected
    ]


def _select_rehearsed(answers: Mapping[str, Answer]) -> dict[str, Rehearsed]:
    return {name: answer for name, answer in answers.items() if isinstance(answer, Rehearsed)}


def _correct_advice(cell: Cell, machine: PlannedMachine, answer: Rehearsed) -> Advice:
    """The advice for a cell whose batch size is already chosen, computed from the rehearsal of this cell."""
    predicted = predict.predict_run(cell, machine, answer=answer)
    if predicted.fits not in ("yes", "likely"):
        return Advice(cell, predicted, None, (": ".join(["does not fit by its rehearsal", *_describe_memory(predicted)]),))
    items_per_s = None if predicted.step_s is None else cell.global_batch_size / predicted.step_s.likely
    return Advice(cell, predicted, items_per_s, tuple(_explain_advice(cell, predicted)))


def _with_batch(cell: Cell, largest_micro_batch: int) -> Cell:
    """The cell with a new micro-batch: the largest power of two not above `largest_micro_batch` and LARGEST_BATCH."""
    micro_batch = 1 << (min(LARGEST_BATCH, largest_micro_batch).bit_length() - 1)
    batch = micro_batch * cell.gradient_accumulation_steps * cell.dp
    return msgspec.structs.replace(cell, micro_batch_size=micro_batch, global_batch_size=batch)


def _describe_memory(predicted: Prediction) -> Iterator[str]:
    """A text with the memory that a rank needs and the memory that a GPU has; empty if the memory of the rank or of the GPU is
    not known."""
    needed, capacity = predicted.memory_bytes, predicted.capacity_bytes
    if needed is not None and capacity is not None:
        yield f"{needed.likely / gpu.GIB:.1f} of {capacity.likely / gpu.GIB:.1f} GiB"


def _ranking_key(advice: Advice) -> tuple[bool, float, float]:
    needed = advice.predicted.memory_bytes
    return advice.items_per_s is None, -(advice.items_per_s or 0.0), needed.likely if needed is not None else 0.0


def rule_facts(
    workload: Workload, machine: PlannedMachine, gpus: int, nodes: int, precision: str, link: str
) -> dict[str, float | bool | str]:
    """The values of the names that the conditions of the studies' rules may use (rules.yaml)."""

    def fits(strategy: str, ranks: int, checkpointing: str = "none") -> bool:
        cell = _make_cell(
            workload, menu.strategy(strategy), ranks, nodes if ranks > 1 else 1, precision, 1, 1, checkpointing, 1
        )
        return predict.predict_run(cell, machine).fits in ("yes", "likely")

    return {
        "parameters_b": workload.parameters / 1e9,
        "gpu_gb": machine.gpu.memory_gb if machine.gpu is not None else 0.0,
        "gpus": gpus,
        "nodes": nodes,
        "link": "infiniband" if link.startswith("infiniband") else link.partition("-")[0],
        "fits_single": fits("single", 1),
        "fits_checkpointed": fits("single", 1, "full"),
        "fits_zero2": fits("fsdp2-zero2", gpus) if gpus > 1 else fits("single", 1),
        "fits_zero3": fits("fsdp2", gpus) if gpus > 1 else fits("single", 1),
    }


def list_candidate_cells(workload: Workload, gpus: int, nodes: int, precision: str) -> Iterator[Cell]:
    """Yields a cell for every strategy that can train the workload and every choice of its degrees (dp, tp, pp) that suits the
    nodes. Each cell has one item per micro-batch."""
    per_node = -(-gpus // nodes)
    for strategy in menu.strategies().values():
        if strategy.refuse_precision(precision) is not None or strategy.servers:
            continue
        for tp, pp in _possible_degrees(strategy, gpus, per_node):
            for checkpointing in ("none", "full") if "activation_checkpointing" in strategy.switches else ("none",):
                passes = PASSES_PER_STAGE * pp if pp > 1 else 1
                cell = _make_cell(workload, strategy, gpus, nodes, precision, tp, pp, checkpointing, passes)
                if strategy.other_work(cell) is None and menu.refuse(cell) is None:
                    yield cell


def _possible_degrees(strategy: Strategy, gpus: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Yields the possible (tensor-parallel degree, pipeline-parallel degree) of a strategy.

    Tensor parallelism stays within a node, because it exchanges more data than the other dimensions.
    """
    degrees = strategy.degrees
    sizes = [size for size in (2, 4, 8, 16, 32, 64) if gpus % size == 0 and size <= gpus]
    tensor_degrees = [size for size in sizes if size <= per_node] if "tp" in degrees else [1]
    pipeline_degrees = sizes if "pp" in degrees else [1]
    for tp, pp in itertools.product(tensor_degrees, pipeline_degrees):
        dp, remainder = divmod(gpus, tp * pp)
        if not remainder and (dp > 1 if "dp" in degrees and len(degrees) > 1 else dp == 1 or "dp" in degrees):
            yield tp, pp


def _make_cell(
    workload: Workload,
    strategy: Strategy,
    gpus: int,
    nodes: int,
    precision: str,
    tp: int,
    pp: int,
    checkpointing: str,
    passes: int,
) -> Cell:
    options = {option.name: option.default for option in (*strategy.options, *workload.options)}
    if "replicas" in options:
        # if there are several nodes, each node holds one replica, which is sharded over the GPUs of the node
        options["replicas"] = max(2, nodes)
    dp = gpus // (tp * pp)
    return Cell(
        workload=workload.name, strategy=strategy.name, gpus=gpus, nnodes=nodes, dp=dp, tp=tp, pp=pp,
        global_batch_size=dp * passes, micro_batch_size=1, gradient_accumulation_steps=passes, seq_len=workload.seq_len,
        steps=1, precision=precision, activation_checkpointing=checkpointing, prove="off",  # type: ignore[arg-type]
        optimizer=workload.optimizer, options=options, workload_code=workload.code,
    )  # fmt: skip


def _advise_on_cell(cell: Cell, machine: PlannedMachine) -> Advice:
    predicted = predict.predict_run(cell, machine)
    if not predicted.largest_micro_batch:
        why = "its memory is not fully known" if predicted.fits != "no" else "does not fit with one item per micro-batch"
        return Advice(cell, predicted, None, (": ".join([why, *_describe_memory(predicted)]),))
    best = _with_batch(cell, predicted.largest_micro_batch)
    batch = best.global_batch_size
    prediction = msgspec.structs.replace(predict.predict_run(best, machine), largest_micro_batch=predicted.largest_micro_batch)
    if prediction.step_s is None:
        return Advice(best, prediction, None, tuple(_explain_advice(best, prediction)))
    step = prediction.step_s
    rates = PredictedRange(batch / step.high, batch / step.likely, batch / step.low)
    return Advice(best, prediction, rates.likely, tuple(_explain_advice(best, prediction)), rates)


def _explain_advice(cell: Cell, predicted: Prediction) -> Iterator[str]:
    """Sentences that say why the cell is as fast as predicted, and what its strategy shards."""
    if predicted.step_s is None:
        yield predicted.how.rpartition("; ")[2]
        return
    shares = {
        name: value / predicted.step_s.likely
        for name, value in predicted.step_parts_s.items()
        if value > 0.02 * predicted.step_s.likely
    }
    yield ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda pair: -pair[1]))
    if cuts := sharding.find_strategy(cell.strategy).cuts:
        yield f"shards {', '.join(cut.replace('_', ' ') for cut in cuts)}"
    if cell.activation_checkpointing != "none":
        yield "with activation checkpointing, a third more computing"
