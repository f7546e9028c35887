"""Advises on strategies for a workload on given GPUs: which fit, how fast they do the same work, and what would change that."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from jobs.planner import memory, model_facts, predict, sharding, step_time
from jobs.planner.machine import PlannedMachine
from jobs.planner.model_facts import ModelFacts
from jobs.planner.rules import AGREEMENT_SHARE, JudgedRule, judge_rules
from shardlab.matrix.cell import Cell
from shardlab.registry import OptionValue
from shardlab.runs.prediction import PredictedRange, Prediction
from shardlab.runs.rehearsed import RehearsalAnswer, Rehearsed
from trainers import menu
from trainers.strategy import Strategy
from trainers.workload import Workload

# Tokens of a step for models of up to this many parameters. Brown et al. (GPT-3, 2020), table 2.1: 0.5 M tokens up to 0.8 B
# parameters, 1 M for 1.3 and 2.7 B, 2 M for 6.7 and 13 B. Touvron et al. (LLaMA, 2023), table 2: 4 M for 33 and 65 B.
BATCH_TOKENS = ((1e9, 2**19), (5e9, 2**20), (30e9, 2**21), (math.inf, 2**22))
# Images of a step, per GPU and at most: ResNet-50 loses no accuracy up to 8,192 images (Goyal et al., 2017, figure 1).
BATCH_IMAGES, MOST_IMAGES = 256, 8192
NEAR = 1.01  # micro-batches, and options of a strategy, whose steps differ by at most this factor count as equal
NAMED_SHARE = 0.02  # a part of the step is a reason if it takes, or differs by, at least this share of the step
# The order in a group of ties: first the strategies that divide only the data, which need no plan for dividing the model (DDP;
# FSDP2, which torch develops; DeepSpeed; FSDP1, which FSDP2 replaces), then those that divide the model.
ENGINES = ("single", "ddp", "fsdp2", "zero", "fsdp1", "mesh", "tensor", "pipeline")
PADDED_MULTIPLE = 64  # of the vocabulary: its rows are then aligned in every precision (NVIDIA, matrix multiplication guide)
DOES_NOT_FIT, UNKNOWN_GPU = "does not fit", "the memory of the GPU is not known"
UNKNOWN_MEMORY = "the memory it needs is known only with --rehearse"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The training for which `jobs advise` compares strategies, all with the same work."""

    workload: Workload
    options: dict[str, OptionValue]
    """All options of the workload."""
    machine: PlannedMachine
    gpus: int
    nodes: int = 1
    precision: str = "bf16"
    seq_len: int | None
    """Tokens of a sequence; None: no sequences."""
    global_batch: int = 1
    """Items (sequences or images) of a step, over all GPUs."""

    @property
    def facts(self) -> ModelFacts:
        """What the planner knows of the model."""
        return model_facts.find_model_facts(make_cell(self, menu.find_strategy("single")))


class Advice(msgspec.Struct, frozen=True):
    """The advice on one strategy with one choice of its degrees (dp, tp, pp)."""

    cell: Cell
    """Trains the global batch with the best micro-batch and activation checkpointing of this strategy, or with a micro-batch of
    one item if none fits."""
    predicted: Prediction
    """The prediction for this cell."""
    items_per_s: float | None = None
    """The likely throughput of all ranks together; None if the cell does not fit the memory, or if the time of a step is not
    known."""
    reasons: tuple[str, ...] = ()
    """The recommended strategy: the parts of its step. A slower one: what takes longer, in percent of the recommended step. One
    without a throughput: why."""
    range_per_s: PredictedRange | None = None
    """The range of this throughput."""
    group: int | None = None
    """The number of the group of ties, 1 for the fastest. The throughputs of a group are at least 95 % of its highest, which is
    within the error of the planner. None: no throughput."""

    @property
    def fits(self) -> bool:
        """Whether the cell is likely to fit the memory of a GPU."""
        return self.predicted.fits in ("yes", "likely")


class AdviceReport(msgspec.Struct, frozen=True):
    """The result of `jobs advise`."""

    ranked: list[Advice]
    """The first is recommended. The last do not fit, cannot divide the global batch, or have no known memory or time."""
    changes: dict[str, Advice]
    """The recommendation if one thing were different, by this difference."""
    rules: list[JudgedRule]
    """The rules of the studies that apply."""


def rank_strategies(
    question: Question,
    alternatives: Mapping[str, Question] | None = None,
    answers: Callable[[Sequence[Cell]], Mapping[str, RehearsalAnswer]] = lambda _: {},
) -> AdviceReport:
    """Rank all strategies that can train a workload on the given GPUs.

    alternatives: questions with one difference, by this difference. answers: returns the results of the rehearsals of cells, by
    the name of the cell; each strategy is rehearsed with the batch that fits.
    """
    sized = list(_list_sized_cells(question))
    candidates = [_choose_micro_batch(cells, question) for cells in sized]
    ranked = _rank_candidates(_correct_by_rehearsals(_rank_candidates(candidates), sized, question, answers))
    slowest_first = sorted(ranked, key=_speed_key, reverse=True)
    throughputs = {entry.cell.strategy: entry.items_per_s for entry in slowest_first if entry.items_per_s is not None}
    changes = {}
    if throughputs:
        checkpointing = ranked[0].cell.activation_checkpointing
        for advice in _rank_candidates([other for other in candidates if other.cell.activation_checkpointing != checkpointing]):
            if _mesh_key(advice) == _mesh_key(ranked[0]):
                changes[f"activation_checkpointing={advice.cell.activation_checkpointing}"] = advice
        for difference, other in (alternatives or {}).items():
            changes[difference] = _rank_candidates([_choose_micro_batch(cells, other) for cells in _list_sized_cells(other)])[0]
    return AdviceReport(ranked, changes, judge_rules(rule_facts(question), throughputs))


def choose_global_batch(question: Question) -> int:
    """The global batch if the user names none: at least the usual number of tokens for the size of the model, or of images for
    the number of GPUs, and a power of two times the number of GPUs, so that most strategies can divide it."""
    items = min(BATCH_IMAGES * question.gpus, MOST_IMAGES)
    if question.seq_len is not None:
        items = next(tokens for most, tokens in BATCH_TOKENS if question.facts.parameters <= most) // question.seq_len
    return question.gpus * (1 << max(0, math.ceil(math.log2(max(1, items) / question.gpus))))


def list_alternatives(question: Question) -> dict[str, Question]:
    """Questions with one difference that often makes training faster, by this difference."""
    batch, options = 4 * question.global_batch, question.options | {"pad_vocabulary": PADDED_MULTIPLE}
    alternatives = {f"--global-batch {batch}, with more passes": msgspec.structs.replace(question, global_batch=batch)}
    if question.facts.unaligned_flops_per_item and "pad_vocabulary" in question.options:
        alternatives[f"--option pad_vocabulary={PADDED_MULTIPLE}"] = msgspec.structs.replace(question, options=options)
    return alternatives


def rule_facts(question: Question) -> dict[str, float | bool | str]:
    """The values of the names that the conditions of the studies' rules may use (rules.yaml)."""
    machine, gpus, nodes = question.machine, question.gpus, question.nodes
    slowest = machine.between if nodes > 1 else machine.inside

    def fits(strategy: str, world_size: int, checkpointing: str = "none") -> bool:
        smaller = msgspec.structs.replace(
            question, gpus=world_size, nodes=nodes if world_size > 1 else 1, global_batch=world_size
        )
        cell = make_cell(smaller, menu.find_strategy(strategy), checkpointing=checkpointing)
        return predict.predict_run(cell, machine).fits in ("yes", "likely")

    return {
        "parameters_b": question.facts.parameters / 1e9,
        "gpu_gb": machine.gpu.memory_gb if machine.gpu is not None else 0.0,
        "gpus": gpus,
        "nodes": nodes,
        "link": "" if slowest is None else re.split("[^a-z]", slowest.name.lower())[0],
        "fits_single": fits("single", 1),
        "fits_checkpointed": fits("single", 1, "full"),
        "fits_zero2": fits("fsdp2-zero2", gpus) if gpus > 1 else fits("single", 1),
        "fits_zero3": fits("fsdp2", gpus) if gpus > 1 else fits("single", 1),
    }


def _list_sized_cells(question: Question) -> Iterator[list[Cell]]:
    """Yields, for every strategy that can train the workload, every choice of its degrees that suits the nodes, each activation
    checkpointing and each `sync`: the cells with the global batch, by micro-batch, the smallest first. If a strategy cannot
    divide the global batch, its only cell has another one."""
    for strategy in menu.load_strategies().values():
        if strategy.refuse_precision(question.precision) is not None or strategy.servers:
            continue
        checkpointings = ("none", "full") if "activation_checkpointing" in strategy.switches else ("none",)
        syncs = [{"sync": sync} for option in strategy.options if option.name == "sync" for sync in option.choices] or [{}]
        for tp, pp in _possible_degrees(strategy, question.gpus, -(-question.gpus // question.nodes)):
            rank_batch, rest = divmod(question.global_batch, question.gpus // (tp * pp))
            powers = {1 << power for power in range(rank_batch.bit_length()) if rank_batch % (1 << power) == 0}
            sizes = [] if rest else sorted(powers | {rank_batch})
            divisible = msgspec.structs.replace(question, global_batch=4 * question.gpus)
            for checkpointing, options in itertools.product(checkpointings, syncs):
                cells = [make_cell(question, strategy, tp, pp, checkpointing, size, options) for size in sizes]
                other = make_cell(divisible, strategy, tp, pp, checkpointing, 1, options)
                if possible := [cell for cell in cells if _can_be_compared(cell)] or [other] * _can_be_compared(other):
                    yield possible


def _can_be_compared(cell: Cell) -> bool:
    """Whether a cell can be trained, and does the same work as one process."""
    return menu.find_strategy(cell.strategy).other_work(cell) is None and menu.refuse(cell) is None


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


def make_cell(
    question: Question,
    strategy: Strategy,
    tp: int = 1,
    pp: int = 1,
    checkpointing: str = "none",
    micro_batch: int = 1,
    options: Mapping[str, OptionValue] | None = None,
) -> Cell:
    """The cell of a strategy that answers the question. options: of the strategy, where they are not the default."""
    all_options = {option.name: option.default for option in strategy.options} | question.options | dict(options or {})
    if "replicas" in all_options:
        # if there are several nodes, each node holds one replica, which is sharded over the GPUs of the node
        all_options["replicas"] = max(2, question.nodes)
    workload, dp = question.workload, question.gpus // (tp * pp)
    return Cell(
        workload=workload.name, strategy=strategy.name, gpus=question.gpus, nnodes=question.nodes, dp=dp, tp=tp, pp=pp,
        global_batch_size=question.global_batch, micro_batch_size=micro_batch,
        gradient_accumulation_steps=max(1, question.global_batch // (dp * micro_batch)), seq_len=question.seq_len, steps=1,
        precision=question.precision, activation_checkpointing=checkpointing, prove="off",  # type: ignore[arg-type]
        optimizer=workload.optimizer, options=all_options, workload_code=workload.code,
    )  # fmt: skip


def _choose_micro_batch(cells: Sequence[Cell], question: Question) -> Advice:
    """The advice on the best of these cells, which differ in their micro-batch: of the fastest that fit, the largest, but one
    that surely fits is better."""
    machine, fitting = question.machine, list[tuple[float, bool, Cell]]()
    if cells[0].global_batch_size != question.global_batch:
        return Advice(cells[0], Prediction(), reasons=(f"cannot divide a global batch of {question.global_batch}",))
    capacity = predict.capacity_of(cells[0], machine)
    for cell in cells:
        needed = memory.predict_memory(cell, on_gpu=machine.on_gpu)
        fits = None if capacity is None else predict.judge_fit(needed.bytes, capacity, complete=needed.complete)
        if fits in ("yes", "likely"):
            step = step_time.predict_step_time(cell, machine)
            fitting.append((0.0 if step is None else step.seconds.likely, fits == "yes", cell))
    near_s = NEAR * min((seconds for seconds, _, _ in fitting), default=0.0)
    near = [(is_sure, cell.micro_batch_size, cell) for seconds, is_sure, cell in fitting if seconds <= near_s]
    return _advise_on_cell(max(near, key=lambda entry: entry[:2])[2] if near else cells[0], machine)


def _advise_on_cell(cell: Cell, machine: PlannedMachine, rehearsal: RehearsalAnswer | None = None) -> Advice:
    """The advice on a cell. rehearsal: its rehearsal, which replaces the formula."""
    prediction = predict.predict_run(cell, machine, rehearsal=rehearsal)
    if prediction.fits not in ("yes", "likely"):
        unknown = UNKNOWN_GPU if prediction.capacity_bytes is None else UNKNOWN_MEMORY
        return Advice(cell, prediction, reasons=(unknown if prediction.fits is None else DOES_NOT_FIT,))
    if prediction.step_s is None:
        return Advice(cell, prediction, reasons=(f"its time is {prediction.how.partition('time: ')[2]}",))
    batch, step = cell.global_batch_size, prediction.step_s
    rates = PredictedRange(batch / step.high, batch / step.likely, batch / step.low)
    return Advice(cell, prediction, rates.likely, range_per_s=rates)


def _correct_by_rehearsals(
    ranked: Sequence[Advice],
    sized: Sequence[Sequence[Cell]],
    question: Question,
    answers: Callable[[Sequence[Cell]], Mapping[str, RehearsalAnswer]],
) -> list[Advice]:
    """The advice, corrected by rehearsals. If a cell does not fit according to its rehearsal, a smaller micro-batch is
    rehearsed. sized: lists of cells that differ in their micro-batch."""
    by_name = {advice.cell.name(): advice for advice in ranked}
    cells = {name: advice.cell for name, advice in by_name.items() if advice.cell.global_batch_size == question.global_batch}
    for _ in range(2):
        rehearsed = answers(list(cells.values())) if cells else {}
        smaller: dict[str, Cell] = {}
        for name, cell in cells.items():
            if isinstance(rehearsal := rehearsed.get(cell.name()), Rehearsed):
                by_name[name] = _advise_on_cell(cell, question.machine, rehearsal)
                largest = 0 if by_name[name].fits else by_name[name].predicted.largest_micro_batch or 0
                others = next(others for others in sized if cell in others)
                smaller |= {name: other for other in others if other.micro_batch_size <= largest}  # noqa: B035 - the last stays
        cells = smaller
    return list(by_name.values())


def _rank_candidates(candidates: Sequence[Advice]) -> list[Advice]:
    """The best candidate for each choice of strategy and degrees, by groups of ties, with the reasons for its place."""
    best: dict[tuple[str, int, int], Advice] = {}
    for advice in candidates:
        if (key := _mesh_key(advice)) not in best or _is_better(advice, best[key]):
            best[key] = advice
    by_speed, groups = sorted(best.values(), key=_speed_key), list[list[Advice]]()
    for advice in by_speed:
        if advice.items_per_s is not None:
            if not groups or advice.items_per_s < AGREEMENT_SHARE * (groups[-1][0].items_per_s or 0.0):
                groups.append([])
            groups[-1].append(advice)
    ordered = [(number, advice) for number, group in enumerate(groups, 1) for advice in sorted(group, key=_preference_key)]
    ranked = [
        msgspec.structs.replace(advice, group=number, reasons=tuple(_explain_time(advice, ordered[0][1])))
        for number, advice in ordered
    ]
    return [*ranked, *(advice for advice in by_speed if advice.items_per_s is None)]


def _is_better(advice: Advice, earlier: Advice) -> bool:
    """Whether the advice is better than another one with the same degrees, which does without an option or recomputing."""
    if advice.items_per_s is None or earlier.items_per_s is None:
        return _speed_key(advice) < _speed_key(earlier)
    return advice.items_per_s > NEAR * earlier.items_per_s


def _mesh_key(advice: Advice) -> tuple[str, int, int]:
    return advice.cell.strategy, advice.cell.tp, advice.cell.pp


def _speed_key(advice: Advice) -> tuple[bool, float, float]:
    needed = advice.predicted.memory_bytes
    return advice.items_per_s is None, -(advice.items_per_s or 0.0), math.inf if needed is None else needed.likely


def _preference_key(advice: Advice) -> tuple[int, int]:
    strategy = sharding.find_strategy(advice.cell.strategy)
    return ENGINES.index(strategy.engine.rpartition(".")[2]), list(menu.load_strategies()).index(strategy.name)


def _explain_time(advice: Advice, best: Advice) -> Iterator[str]:
    """The parts of a step in percent, if the advice is the best; else what takes longer, in percent of the step of the best."""
    step_s, compute, sign = best.predicted.step_s, "compute", "" if advice is best else "+"
    assert step_s is not None
    if best.cell.activation_checkpointing == "none" != advice.cell.activation_checkpointing:
        compute = "recomputing"
    elif advice.cell.tp * advice.cell.pp > best.cell.tp * best.cell.pp:
        # No pipeline divides the product with the vocabulary, which is slow if it is unaligned.
        facts = model_facts.find_model_facts(advice.cell)
        if facts.unaligned_flops_per_item > 0:
            compute = "unpadded head"
        elif facts.head_share == 1 or advice.cell.pp > best.cell.pp:
            compute = "undivided head"
    best_parts = {} if advice is best else best.predicted.step_parts_s
    parts = {name: part_s - best_parts.get(name, 0.0) for name, part_s in advice.predicted.step_parts_s.items()}
    for name, part_s in sorted(parts.items(), key=lambda part: -part[1]):
        if (share := part_s / step_s.likely) >= NAMED_SHARE:
            yield f"{compute if name == 'compute' else name} {sign}{100 * share:.0f} %"
