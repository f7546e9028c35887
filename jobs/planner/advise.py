"""Ranks strategies for a workload on given GPUs: which fit, with which batch, how fast, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from jobs.planner import gpu, predict, sharding
from jobs.planner.machine import PlannedMachine
from jobs.planner.rules import JudgedRule, judge
from shardlab.matrix.cell import Cell, Instruments, Schedule
from shardlab.runs.prediction import PredictedRange, Prediction
from shardlab.runs.rehearsed import Answer, Rehearsed
from trainers import menu
from trainers.strategy import Strategy
from trainers.workload import Workload

LARGEST_BATCH = 64  # the largest micro-batch that is considered: a larger one hardly makes a step more efficient
PASSES_PER_STAGE = 4  # micro-batches per pipeline stage: with this rule of study 4, the bubble is below a fifth of the step


class Advice(msgspec.Struct, frozen=True):
    """The advice on one strategy with one choice of its degrees (dp, tp, pp).

    cell: trains with this strategy and the largest micro-batch that fits, or with a micro-batch of one item if none fits.
    items_per_s: the likely throughput of all ranks together; None if the cell does not fit the memory, or if the time of a
    step is not known. range_per_s: the range of this throughput.
    """

    cell: Cell
    predicted: Prediction  # the prediction for this cell
    items_per_s: float | None
    reasons: tuple[str, ...]  # sentences on what decides the place of the strategy in the ranking
    range_per_s: PredictedRange | None = None

    @property
    def fits(self) -> bool:
        """Whether the cell is likely to fit the memory of a GPU."""
        return self.predicted.fits in ("yes", "likely")


class AdviceReport(msgspec.Struct, frozen=True):
    """The result of `jobs advise`: the strategies that fit (the fastest first), the strategies that do not fit, and the rules
    of the studies that apply."""

    ranked: list[Advice]
    rules: list[JudgedRule]


def of(
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
    found = [_advice(cell, machine) for cell in candidates(workload, gpus, nodes, precision)]
    best: dict[tuple[object, ...], Advice] = {}
    for one in found:  # compare each cell with and without activation checkpointing, and keep the better of the two
        key = (one.cell.strategy, one.cell.tp, one.cell.pp)
        if key not in best or _order(one) < _order(best[key]):
            best[key] = one
    ranked = sorted(_by_rehearsal(sorted(best.values(), key=_order), machine, answers), key=_order)
    throughputs: dict[str, float] = {}
    for one in ranked:
        if one.items_per_s is not None:
            throughputs.setdefault(one.cell.strategy, one.items_per_s)
    facts = rule_facts(workload, machine, gpus, nodes, precision, link)
    return AdviceReport(ranked, judge(facts, throughputs))


def _by_rehearsal(
    ranked: Sequence[Advice], machine: PlannedMachine, answers: Callable[[Sequence[Cell]], Mapping[str, Answer]]
) -> list[Advice]:
    """The advice, corrected by rehearsals. If a cell does not fit according to its rehearsal, a smaller batch is rehearsed."""
    found = _rehearsed(answers([one.cell for one in ranked]))
    corrected = [_again(one.cell, machine, found[one.cell.name()]) if one.cell.name() in found else one for one in ranked]
    smaller = {
        one.cell.name(): _with_batch(one.cell, one.predicted.largest_micro_batch)
        for one in corrected
        if not one.fits and one.predicted.memory_from == "rehearsal" and one.predicted.largest_micro_batch
    }
    found = _rehearsed(answers(list(smaller.values()))) if smaller else {}
    return [
        one
        if (cell := smaller.get(one.cell.name())) is None or cell.name() not in found
        else _again(cell, machine, found[cell.name()])
        for one in corrected
    ]


def _rehearsed(answers: Mapping[str, Answer]) -> dict[str, Rehearsed]:
    return {name: answer for name, answer in answers.items() if isinstance(answer, Rehearsed)}


def _again(cell: Cell, machine: PlannedMachine, answer: Rehearsed) -> Advice:
    """The advice for a cell whose batch size is already chosen, computed from the rehearsal of this cell."""
    found = predict.of(cell, machine, answer=answer)
    if found.fits not in ("yes", "likely"):
        return Advice(cell, found, None, (": ".join(["does not fit by its rehearsal", *_sizes(found)]),))
    rate = None if found.step_s is None else cell.global_batch_size / found.step_s.likely
    return Advice(cell, found, rate, tuple(_reasons(cell, found)))


def _with_batch(cell: Cell, largest: int) -> Cell:
    """The cell with a new micro-batch: the largest power of two that exceeds neither `largest` nor LARGEST_BATCH."""
    micro = 1 << (min(LARGEST_BATCH, largest).bit_length() - 1)
    batch = micro * cell.gradient_accumulation_steps * cell.dp
    return msgspec.structs.replace(cell, micro_batch_size=micro, global_batch_size=batch)


def _sizes(predicted: Prediction) -> Iterator[str]:
    """A text with the memory that a rank needs and the memory that a GPU has; empty if the memory of the rank or of the GPU is
    not known."""
    needed, capacity = predicted.memory_bytes, predicted.capacity_bytes
    if needed is not None and capacity is not None:
        yield f"{needed.likely / gpu.GIB:.1f} of {capacity.likely / gpu.GIB:.1f} GiB"


def _order(one: Advice) -> tuple[bool, float, float]:
    needed = one.predicted.memory_bytes
    return one.items_per_s is None, -(one.items_per_s or 0.0), needed.likely if needed is not None else 0.0


def rule_facts(
    workload: Workload, machine: PlannedMachine, gpus: int, nodes: int, precision: str, link: str
) -> dict[str, float | bool | str]:
    """The values of the names that the conditions of the studies' rules may use (rules.yaml)."""

    def fits(strategy: str, ranks: int, checkpointing: str = "none") -> bool:
        cell = _cell(workload, menu.strategy(strategy), ranks, nodes if ranks > 1 else 1, precision, 1, 1, checkpointing, 1)
        return predict.of(cell, machine).fits in ("yes", "likely")

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


def candidates(workload: Workload, gpus: int, nodes: int, precision: str) -> Iterator[Cell]:
    """Yields a cell for every strategy that can train the workload and every choice of its degrees (dp, tp, pp) that suits the
    nodes. Each cell has one item per micro-batch."""
    per_node = -(-gpus // nodes)
    for strategy in menu.strategies().values():
        if strategy.refuse_precision(precision) is not None or strategy.servers:
            continue
        for tp, pp in _degrees(strategy, gpus, per_node):
            for checkpointing in ("none", "full") if "activation_checkpointing" in strategy.switches else ("none",):
                passes = PASSES_PER_STAGE * pp if pp > 1 else 1
                cell = _cell(workload, strategy, gpus, nodes, precision, tp, pp, checkpointing, passes)
                if strategy.other_work(cell) is None and menu.refuse(cell) is None:
                    yield cell


def _degrees(strategy: Strategy, gpus: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Yields the possible (tensor-parallel degree, pipeline-parallel degree) of a strategy.

    Tensor parallelism stays within a node, because it exchanges more data than the other dimensions.
    """
    degrees = strategy.degrees
    sizes = [size for size in (2, 4, 8, 16, 32, 64) if gpus % size == 0 and size <= gpus]
    tensor = [size for size in sizes if size <= per_node] if "tp" in degrees else [1]
    pipeline = sizes if "pp" in degrees else [1]
    for tp, pp in itertools.product(tensor, pipeline):
        rest, odd = divmod(gpus, tp * pp)
        if not odd and (rest > 1 if "dp" in degrees and len(degrees) > 1 else rest == 1 or "dp" in degrees):
            yield tp, pp


def _cell(
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
        workload=workload.name, strategy=strategy.name, gpus=gpus, nnodes=nodes, dp=dp, tp=tp, pp=pp, servers=0,
        launcher="torchrun", global_batch_size=dp * passes, micro_batch_size=1, gradient_accumulation_steps=passes,
        seq_len=workload.seq_len, steps=1, epochs=None, warmup_steps=0, precision=precision,  # type: ignore[arg-type]
        activation_checkpointing=checkpointing, compile=False, max_grad_norm=None, prove="off",
        optimizer=workload.optimizer, schedule=Schedule(), instruments=Instruments(), memory_limit_gib=None, seed=42,
        time_limit_s=None, expect=[], options=options, workload_code=workload.code,
    )  # fmt: skip


def _advice(cell: Cell, machine: PlannedMachine) -> Advice:
    predicted = predict.of(cell, machine)
    if not predicted.largest_micro_batch:
        why = "its memory is not fully known" if predicted.fits != "no" else "does not fit with one item per micro-batch"
        return Advice(cell, predicted, None, (": ".join([why, *_sizes(predicted)]),))
    chosen = _with_batch(cell, predicted.largest_micro_batch)
    batch = chosen.global_batch_size
    found = msgspec.structs.replace(predict.of(chosen, machine), largest_micro_batch=predicted.largest_micro_batch)
    if found.step_s is None:
        return Advice(chosen, found, None, tuple(_reasons(chosen, found)))
    step = found.step_s
    rates = PredictedRange(batch / step.high, batch / step.likely, batch / step.low)
    return Advice(chosen, found, rates.likely, tuple(_reasons(chosen, found)), rates)


def _reasons(cell: Cell, found: Prediction) -> Iterator[str]:
    """Sentences that say why the cell is as fast as predicted, and what its strategy shards."""
    if found.step_s is None:
        yield found.how.rpartition("; ")[2]
        return
    shares = {
        name: value / found.step_s.likely for name, value in found.step_parts_s.items() if value > 0.02 * found.step_s.likely
    }
    yield ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda pair: -pair[1]))
    if cuts := sharding.strategy(cell.strategy).cuts:
        yield f"shards {', '.join(cut.replace('_', ' ') for cut in cuts)}"
    if cell.activation_checkpointing != "none":
        yield "with activation checkpointing, a third more computing"
