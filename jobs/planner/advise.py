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
USUAL_BATCH_TOKENS = ((1e9, 2**19), (5e9, 2**20), (30e9, 2**21), (math.inf, 2**22))
# Images of a step, per GPU and at most: ResNet-50 loses no accuracy up to 8,192 images (Goyal et al., 2017, figure 1).
IMAGES_PER_GPU, MOST_BATCH_IMAGES = 256, 8192
EQUAL_FACTOR = 1.01  # micro-batches, and options of a strategy, whose steps differ by at most this factor count as equal
NAMED_SHARE = 0.02  # a part of the step is a reason if it takes, or differs by, at least this share of the step
# The order in a group of ties: first the strategies that divide only the data, which need no plan for dividing the model (DDP;
# FSDP2, which torch develops; DeepSpeed; FSDP1, which FSDP2 replaces; local SGD), then those that divide the model.
ENGINE_ORDER = ("single", "ddp", "fsdp2", "zero", "fsdp1", "local_sgd", "mesh", "tensor", "pipeline")
# of the vocabulary: its rows are then aligned in every precision (NVIDIA, matrix multiplication guide)
VOCABULARY_MULTIPLE = 64
DOES_NOT_FIT, UNKNOWN_GPU_MEMORY = "does not fit", "the memory of the GPU is not known"
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
    question_by_change: Mapping[str, Question] | None = None,
    get_answers: Callable[[Sequence[Cell]], Mapping[str, RehearsalAnswer]] = lambda _: {},
) -> AdviceReport:
    """Rank all strategies that can train a workload on the given GPUs.

    question_by_change: questions with one difference, by this difference. get_answers: returns the results of the rehearsals of
    cells, by the name of the cell; each strategy is rehearsed with the batch that fits."""
    variants = list(_list_batch_variants(question))
    candidates = [_advise_on_variants(cells, question) for cells in variants]
    ranked_advice = _rank_candidates(_correct_by_rehearsals(_rank_candidates(candidates), variants, question, get_answers))
    slowest_first = sorted(ranked_advice, key=_make_speed_key, reverse=True)
    rate_by_strategy = {advice.cell.strategy: advice.items_per_s for advice in slowest_first if advice.items_per_s is not None}
    advice_by_change = {}
    if rate_by_strategy:
        best_checkpointing = ranked_advice[0].cell.activation_checkpointing
        for advice in _rank_candidates(
            [candidate for candidate in candidates if candidate.cell.activation_checkpointing != best_checkpointing]
        ):
            if _make_mesh_key(advice) == _make_mesh_key(ranked_advice[0]):
                advice_by_change[f"activation_checkpointing={advice.cell.activation_checkpointing}"] = advice
        for change, alternative in (question_by_change or {}).items():
            advice_by_change[change] = _rank_candidates(
                [_advise_on_variants(cells, alternative) for cells in _list_batch_variants(alternative)]
            )[0]
    return AdviceReport(ranked_advice, advice_by_change, judge_rules(make_rule_values(question), rate_by_strategy))


def choose_global_batch(question: Question) -> int:
    """The global batch if the user names none: at least the usual number of tokens for the size of the model, or of images for
    the number of GPUs, and a power of two times the number of GPUs, so that most strategies can divide it."""
    batch_items = min(IMAGES_PER_GPU * question.gpus, MOST_BATCH_IMAGES)
    if question.seq_len is not None:
        batch_items = (
            next(
                batch_tokens
                for most_parameters, batch_tokens in USUAL_BATCH_TOKENS
                if question.facts.parameters <= most_parameters
            )
            // question.seq_len
        )
    return question.gpus * (1 << max(0, math.ceil(math.log2(max(1, batch_items) / question.gpus))))


def list_alternatives(question: Question) -> dict[str, Question]:
    """Questions with one difference that often makes training faster, by this difference."""
    larger_batch, padded_options = 4 * question.global_batch, question.options | {"pad_vocabulary": VOCABULARY_MULTIPLE}
    question_by_change = {
        f"--global-batch {larger_batch}, with more passes": msgspec.structs.replace(question, global_batch=larger_batch)
    }
    if question.facts.unaligned_flops_per_item and "pad_vocabulary" in question.options:
        question_by_change[f"--option pad_vocabulary={VOCABULARY_MULTIPLE}"] = msgspec.structs.replace(
            question, options=padded_options
        )
    return question_by_change


def make_rule_values(question: Question) -> dict[str, float | bool | str]:
    """The values of the names that the conditions of the studies' rules may use (rules.yaml)."""
    machine, gpus, nodes = question.machine, question.gpus, question.nodes
    slowest_link = machine.link_between_nodes if nodes > 1 else machine.link_inside_node

    def strategy_fits(strategy: str, world_size: int, checkpointing: str = "none") -> bool:
        smaller_question = msgspec.structs.replace(
            question, gpus=world_size, nodes=nodes if world_size > 1 else 1, global_batch=world_size
        )
        cell = make_cell(smaller_question, menu.find_strategy(strategy), checkpointing=checkpointing)
        return predict.predict_run(cell, machine).fits in ("yes", "likely")

    return {
        "parameters_b": question.facts.parameters / 1e9,
        "gpu_gb": machine.gpu_model.memory_gb if machine.gpu_model is not None else 0.0,
        "gpus": gpus,
        "nodes": nodes,
        "link": "" if slowest_link is None else re.split("[^a-z]", slowest_link.name.lower())[0],
        "fits_single": strategy_fits("single", 1),
        "fits_checkpointed": strategy_fits("single", 1, "full"),
        "fits_zero2": strategy_fits("fsdp2-zero2", gpus) if gpus > 1 else strategy_fits("single", 1),
        "fits_zero3": strategy_fits("fsdp2", gpus) if gpus > 1 else strategy_fits("single", 1),
    }


def _list_batch_variants(question: Question) -> Iterator[list[Cell]]:
    """Yields, for every strategy that can train the workload, every choice of its degrees that suits the nodes, each activation
    checkpointing and each `sync`: the cells with the global batch, by micro-batch, the smallest first. If a strategy cannot
    divide the global batch, its only cell has another one."""
    for strategy in menu.load_strategies().values():
        if strategy.refuse_precision(question.precision) is not None or strategy.servers:
            continue
        checkpointings = ("none", "full") if "activation_checkpointing" in strategy.switches else ("none",)
        sync_choices = [{"sync": sync} for option in strategy.options if option.name == "sync" for sync in option.choices] or [
            {}
        ]
        for tp, pp in _list_possible_degrees(strategy, question.gpus, -(-question.gpus // question.nodes)):
            rank_items, remainder = divmod(question.global_batch, question.gpus // (tp * pp))
            powers_of_two = {1 << exponent for exponent in range(rank_items.bit_length()) if rank_items % (1 << exponent) == 0}
            micro_batches = [] if remainder else sorted(powers_of_two | {rank_items})
            divisible_question = msgspec.structs.replace(question, global_batch=4 * question.gpus)
            for checkpointing, sync_choice in itertools.product(checkpointings, sync_choices):
                cells = [
                    make_cell(question, strategy, tp, pp, checkpointing, micro_batch, sync_choice)
                    for micro_batch in micro_batches
                ]
                divisible_cell = make_cell(divisible_question, strategy, tp, pp, checkpointing, 1, sync_choice)
                if comparable_cells := [cell for cell in cells if _can_be_compared(cell)] or [
                    divisible_cell
                ] * _can_be_compared(divisible_cell):
                    yield comparable_cells


def _can_be_compared(cell: Cell) -> bool:
    """Whether a cell can be trained, and does the same work as one process."""
    return menu.find_strategy(cell.strategy).other_work(cell) is None and menu.refuse(cell) is None


def _list_possible_degrees(strategy: Strategy, gpus: int, gpus_per_node: int) -> Iterator[tuple[int, int]]:
    """Yields the possible (tensor-parallel degree, pipeline-parallel degree) of a strategy.

    Tensor parallelism stays within a node, because it exchanges more data than the other dimensions.
    """
    degree_names = strategy.degrees
    possible_sizes = [degree for degree in (2, 4, 8, 16, 32, 64) if gpus % degree == 0 and degree <= gpus]
    tensor_degrees = [degree for degree in possible_sizes if degree <= gpus_per_node] if "tp" in degree_names else [1]
    pipeline_degrees = possible_sizes if "pp" in degree_names else [1]
    for tp, pp in itertools.product(tensor_degrees, pipeline_degrees):
        dp, remainder = divmod(gpus, tp * pp)
        if not remainder and (dp > 1 if "dp" in degree_names and len(degree_names) > 1 else dp == 1 or "dp" in degree_names):
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


def _advise_on_variants(variants: Sequence[Cell], question: Question) -> Advice:
    """The advice on the best of these cells, which differ in their micro-batch: of the fastest that fit, the largest, but one
    that surely fits is better."""
    machine, fitting_cells = question.machine, list[tuple[float, bool, Cell]]()
    if variants[0].global_batch_size != question.global_batch:
        return Advice(variants[0], Prediction(), reasons=(f"cannot divide a global batch of {question.global_batch}",))
    gpu_capacity = predict.find_gpu_capacity(variants[0], machine)
    for cell in variants:
        needed_memory = memory.predict_memory(cell, on_gpu=machine.on_gpu)
        fit = (
            None
            if gpu_capacity is None
            else predict.judge_fit(needed_memory.total_bytes, gpu_capacity, is_complete=needed_memory.is_complete)
        )
        if fit in ("yes", "likely"):
            predicted_step = step_time.predict_step_time(cell, machine)
            fitting_cells.append((0.0 if predicted_step is None else predicted_step.step_s.likely, fit == "yes", cell))
    longest_equal_s = EQUAL_FACTOR * min((step_s for step_s, _, _ in fitting_cells), default=0.0)
    equal_cells = [
        (is_sure, cell.micro_batch_size, cell) for step_s, is_sure, cell in fitting_cells if step_s <= longest_equal_s
    ]
    return _advise_on_cell(max(equal_cells, key=lambda near_cell: near_cell[:2])[2] if equal_cells else variants[0], machine)


def _advise_on_cell(cell: Cell, machine: PlannedMachine, rehearsal: RehearsalAnswer | None = None) -> Advice:
    """The advice on a cell. rehearsal: its rehearsal, which replaces the formula."""
    prediction = predict.predict_run(cell, machine, rehearsal=rehearsal)
    if prediction.fits not in ("yes", "likely"):
        unknown_reason = UNKNOWN_GPU_MEMORY if prediction.capacity_bytes is None else UNKNOWN_MEMORY
        return Advice(cell, prediction, reasons=(unknown_reason if prediction.fits is None else DOES_NOT_FIT,))
    if prediction.step_s is None:
        return Advice(cell, prediction, reasons=(f"its time is {prediction.how.partition('time: ')[2]}",))
    batch_items, step_s = cell.global_batch_size, prediction.step_s
    rate_range = PredictedRange(batch_items / step_s.high, batch_items / step_s.likely, batch_items / step_s.low)
    return Advice(cell, prediction, rate_range.likely, range_per_s=rate_range)


def _correct_by_rehearsals(
    ranked_advice: Sequence[Advice],
    variants: Sequence[Sequence[Cell]],
    question: Question,
    get_answers: Callable[[Sequence[Cell]], Mapping[str, RehearsalAnswer]],
) -> list[Advice]:
    """The advice, corrected by rehearsals. If a cell does not fit according to its rehearsal, a smaller micro-batch is
    rehearsed. variants: lists of cells that differ in their micro-batch."""
    advice_by_name = {advice.cell.name(): advice for advice in ranked_advice}
    cell_by_name = {
        cell_name: advice.cell
        for cell_name, advice in advice_by_name.items()
        if advice.cell.global_batch_size == question.global_batch
    }
    for _ in range(2):
        answer_by_name = get_answers(list(cell_by_name.values())) if cell_by_name else {}
        smaller_cells: dict[str, Cell] = {}
        for cell_name, cell in cell_by_name.items():
            if isinstance(rehearsal := answer_by_name.get(cell.name()), Rehearsed):
                advice_by_name[cell_name] = _advise_on_cell(cell, question.machine, rehearsal)
                largest_micro_batch = (
                    0 if advice_by_name[cell_name].fits else advice_by_name[cell_name].predicted.largest_micro_batch or 0
                )
                strategy_variants = next(strategy_variants for strategy_variants in variants if cell in strategy_variants)
                fitting_cells = [cell for cell in strategy_variants if cell.micro_batch_size <= largest_micro_batch]
                smaller_cells |= {cell_name: fitting_cells[-1]} if fitting_cells else {}
        cell_by_name = smaller_cells
    return list(advice_by_name.values())


def _rank_candidates(candidates: Sequence[Advice]) -> list[Advice]:
    """The best candidate for each choice of strategy and degrees, by groups of ties, with the reasons for its place."""
    best_by_mesh: dict[tuple[str, int, int], Advice] = {}
    for advice in candidates:
        if (mesh_key := _make_mesh_key(advice)) not in best_by_mesh or _is_better(advice, best_by_mesh[mesh_key]):
            best_by_mesh[mesh_key] = advice
    fastest_first, tie_groups = sorted(best_by_mesh.values(), key=_make_speed_key), list[list[Advice]]()
    for advice in fastest_first:
        if advice.items_per_s is not None:
            if not tie_groups or advice.items_per_s < AGREEMENT_SHARE * (tie_groups[-1][0].items_per_s or 0.0):
                tie_groups.append([])
            tie_groups[-1].append(advice)
    numbered_advice = [
        (group_number, advice)
        for group_number, tie_group in enumerate(tie_groups, 1)
        for advice in sorted(tie_group, key=_make_preference_key)
    ]
    ranked_advice = [
        msgspec.structs.replace(advice, group=group_number, reasons=tuple(_explain_time(advice, numbered_advice[0][1])))
        for group_number, advice in numbered_advice
    ]
    return [*ranked_advice, *(advice for advice in fastest_first if advice.items_per_s is None)]


def _is_better(advice: Advice, other_advice: Advice) -> bool:
    """Whether the advice is better than another one with the same degrees, which does without an option or recomputing."""
    if advice.items_per_s is None or other_advice.items_per_s is None:
        return _make_speed_key(advice) < _make_speed_key(other_advice)
    return advice.items_per_s > EQUAL_FACTOR * other_advice.items_per_s


def _make_mesh_key(advice: Advice) -> tuple[str, int, int]:
    return advice.cell.strategy, advice.cell.tp, advice.cell.pp


def _make_speed_key(advice: Advice) -> tuple[bool, float, float]:
    needed_bytes = advice.predicted.memory_bytes
    return advice.items_per_s is None, -(advice.items_per_s or 0.0), math.inf if needed_bytes is None else needed_bytes.likely


def _make_preference_key(advice: Advice) -> tuple[int, int]:
    strategy = sharding.find_strategy(advice.cell.strategy)
    return ENGINE_ORDER.index(strategy.engine.rpartition(".")[2]), list(menu.load_strategies()).index(strategy.name)


def _explain_time(advice: Advice, best_advice: Advice) -> Iterator[str]:
    """The parts of a step in percent, if the advice is the best; else what takes longer, in percent of the step of the best."""
    step_s, compute_name, plus_sign = best_advice.predicted.step_s, "compute", "" if advice is best_advice else "+"
    assert step_s is not None
    if best_advice.cell.activation_checkpointing == "none" != advice.cell.activation_checkpointing:
        compute_name = "recomputing"
    elif advice.cell.tp * advice.cell.pp > best_advice.cell.tp * best_advice.cell.pp:
        # No pipeline divides the product with the vocabulary, which is slow if it is unaligned.
        facts = model_facts.find_model_facts(advice.cell)
        if facts.unaligned_flops_per_item > 0:
            compute_name = "unpadded head"
        elif facts.head_share == 1 or advice.cell.pp > best_advice.cell.pp:
            compute_name = "undivided head"
    best_parts_s = {} if advice is best_advice else best_advice.predicted.step_parts_s
    extra_s_by_part = {
        part_name: part_s - best_parts_s.get(part_name, 0.0) for part_name, part_s in advice.predicted.step_parts_s.items()
    }
    for part_name, part_s in sorted(extra_s_by_part.items(), key=lambda named_part: -named_part[1]):
        if (step_share := part_s / step_s.likely) >= NAMED_SHARE:
            yield f"{compute_name if part_name == 'compute' else part_name} {plus_sign}{100 * step_share:.0f} %"
