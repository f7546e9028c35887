"""Predicts the time of an optimizer step: computing, the optimizer, communication that is not hidden, bubble and stragglers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import msgspec

from jobs.planner import compute_time, device_profile, exchanges, model_facts, pipeline_schedule, pipeline_share, sharding
from jobs.planner.link import PlannedLink
from jobs.planner.machine import PlannedMachine
from jobs.planner.model_facts import ModelFacts
from shardlab.hardware.gpu_models import GpuModel
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import ZERO, PredictedRange, sum_ranges
from trainers.theory.term import Axis, Term

# the share of backward in the time of a pass: backward computes two products of matrices for each product in forward
BACKWARD = 2 / 3
# WINDOW: the share of the computing time in which communication can be hidden. EXPOSED: the share of hidden communication by
# which it makes a step longer nevertheless: a part at the ends of passes does not overlap, and its kernels take multiprocessors
# and bandwidth of the memory from computing. Both have three values: for the fastest, the likely and the slowest step. Study 2,
# section 4.5.4: 92.5 % of DDP's all-reduces and 95.1 % and 98.1 % of FSDP's all-gathers overlap with computing. What computing
# loses is fitted to benchmarks/published.
WINDOW = PredictedRange(0.95, 0.85, 0.6)
EXPOSED = PredictedRange(0.03, 0.15, 0.35)
# The share of bandwidth that a network loses each time the number of nodes doubles, by congestion and by the latency of more
# hops. Fernandez et al., 2024 (arXiv 2411.13055), all-reduces on 4 to 512 DGX H100: 0.6 % with 16 GiB, 2 % with 1 GiB, 6 % with
# 128 MiB. llm-foundry on H100 loses 5 to 10 % of its throughput from 16 to 64 nodes.
CONGESTION = PredictedRange(0.0, 0.02, 0.06)
STRAGGLER_DEVIATION = PredictedRange(0.0, 0.01, 0.03)  # standard deviation of a rank's step time, divided by the mean; assumed
UPDATE_BYTES = {True: 28, False: 72}  # bytes per parameter that Adam in fp32 reads and writes; True: the fused optimizer

# The time of a collective follows the alpha-beta model, by algorithm (Thakur et al., 2005; Patarasuk and Yuan, 2009). Seconds
# for n ranks and S bytes, if a hop (a message from one rank to the next) takes alpha seconds, and the bus bandwidth is B:
#
#     ring   all-reduce 2(n-1) alpha + 2 (n-1)/n S/B; all-gather, reduce-scatter (n-1) alpha + (n-1)/n S/B
#     tree   all-reduce 2 ceil(log2 n) alpha + 2 S/B (reduce, then broadcast, pipelined)
#     send   alpha + S/B
#
# NCCL chooses the faster algorithm for each size, and so does `faster_s`.


class PredictedStepTime(msgspec.Struct, frozen=True):
    """The predicted time of a step in seconds."""

    parts: dict[str, PredictedRange]
    """Its parts by name, which add up to the step."""
    communication: PredictedRange
    """The time of all communication, hidden or not."""
    links: tuple[PlannedLink, ...]
    """The links that the communication uses."""

    @property
    def seconds(self) -> PredictedRange:
        """The time of the whole step."""
        return sum_ranges(self.parts)

    @property
    def bottleneck(self) -> str:
        """The name of the part of the step that takes the longest time."""
        return max(self.parts, key=lambda name: self.parts[name].likely)


def predict_step_time(cell: Cell, machine: PlannedMachine) -> PredictedStepTime | None:
    """The time of a step; None if a part of it is not known: the GPU, the operations, the exchanges or a link."""
    facts = model_facts.find_model_facts(cell)
    if machine.gpu is None or facts.flops_per_item is None or (known_exchanges := exchanges.list_exchanges(cell)) is None:
        return None
    timed_exchanges = [(exchange, find_group_link(cell, exchange.axis, machine)) for exchange in known_exchanges]
    computing = compute_time.predict_compute_time(cell, facts, machine.gpu)
    if computing is None or any(link is None for _, link in timed_exchanges):
        return None
    passes = cell.gradient_accumulation_steps
    compute = (computing.blocks + computing.head).times(passes)
    launches = _predict_launch_time(cell, facts, compute)
    update = _predict_update_time(cell, facts, machine.gpu)
    unhideable, hideable = ZERO, dict.fromkeys(_share_windows(cell), ZERO)
    for exchange, link in timed_exchanges:
        assert link is not None
        seconds = predict_exchange_time(exchange, link)
        if exchange.hides_in is None:
            unhideable += seconds
        else:
            hideable[exchange.hides_in] += seconds
    busy_s = compute + launches
    exposed = unhideable + _predict_exposed_time(cell, hideable, busy_s)
    # The last stage, which has the head, sets the pace, and all stages wait as long as passes through blocks take.
    bubble = (computing.blocks.times(passes) + launches).times(_bubble_over_compute(cell))
    return PredictedStepTime(
        {
            "compute": compute,
            "launches": launches,
            "optimizer": update,
            "communication": exposed,
            "bubble": bubble,
            "stragglers": _predict_straggler_time(cell, busy_s + update + exposed + bubble),
        },
        sum_ranges(hideable) + unhideable,
        tuple({link.name: link for _, link in timed_exchanges if link is not None}.values()),
    )


def find_group_link(cell: Cell, axis: Axis, machine: PlannedMachine) -> PlannedLink | None:
    """The link of one group of ranks along an axis; None if it is not known. Consecutive ranks differ in tp first, then in dp,
    then in pp, and fill one node after another. Several groups of a node share its network, and a group uses no more of the
    network than its GPUs bring to the network cards."""
    per_node = -(-cell.gpus // cell.nnodes)
    ranks_spanned = {"tp": cell.tp, "dp": cell.tp * cell.shards, "replicas": cell.tp * cell.dp, "pp": cell.gpus}[axis]
    if ranks_spanned <= per_node or machine.between is None:
        return machine.inside if ranks_spanned <= per_node else None
    rank_stride = {"tp": 1, "dp": cell.tp, "replicas": cell.tp * cell.shards, "pp": cell.tp * cell.dp}[axis]
    groups, doublings = max(1, min(rank_stride, per_node)), math.log2(cell.nnodes)
    bandwidths = [
        bandwidth * (1 - lost) ** doublings / groups
        for bandwidth, lost in zip(
            msgspec.structs.astuple(machine.between.bandwidth),
            (CONGESTION.high, CONGESTION.likely, CONGESTION.low),
            strict=True,
        )
    ]
    if machine.inside is not None:
        bandwidths = [min(pair) for pair in zip(bandwidths, msgspec.structs.astuple(machine.inside.bandwidth), strict=True)]
    return msgspec.structs.replace(machine.between, bandwidth=PredictedRange(*bandwidths))


def _predict_launch_time(cell: Cell, facts: ModelFacts, compute: PredictedRange) -> PredictedRange:
    """The seconds in a step that the GPU waits until the host starts operators. compute: the seconds that it computes."""
    passes = cell.gradient_accumulation_steps
    operators = passes * device_profile.OPERATORS * max(1, facts.blocks / cell.pp) * (0.3 if cell.compile else 1.0)
    host_time = device_profile.LAUNCH_S.times(operators)
    pairs = ((host_time.low, compute.low), (host_time.likely, compute.likely), (host_time.high, compute.high))
    return PredictedRange(*sorted(max(0.0, started_s - computed_s) for started_s, computed_s in pairs))


def _predict_update_time(cell: Cell, facts: ModelFacts, gpu: GpuModel) -> PredictedRange:
    """The seconds of the optimizer and of the copies of weights for computing. Both are limited by the memory bandwidth."""
    division = sharding.divide_model(cell, facts.parameters)
    if not division.optimizer_ranks:
        return ZERO  # the optimizer runs on the CPU, whose time is not predicted
    parameters = facts.parameters / (cell.tp * cell.pp)
    moved_bytes = UPDATE_BYTES[cell.optimizer.fused] if cell.optimizer.name != "sgd" else 20 if cell.optimizer.momentum else 12
    moved_bytes = moved_bytes // 2 if cell.precision == "bf16-pure" else moved_bytes
    copies = 6 if division.copy_bytes else 0
    size = parameters * (moved_bytes / division.optimizer_ranks + copies)
    return compute_time.divide_by_rate(size, device_profile.STREAMED.times(gpu.memory_gb_per_s * 1e9))


def _share_windows(cell: Cell) -> dict[str, float]:
    """The share of each window in the computing of a step. Each window contains the windows before it."""
    return {"last_backward": BACKWARD / cell.gradient_accumulation_steps, "backward": BACKWARD, "step": 1.0}


def _predict_exposed_time(cell: Cell, hideable: dict[str, PredictedRange], busy_s: PredictedRange) -> PredictedRange:
    """The seconds by which communication makes a step longer, although it may overlap with computing.

    hideable: the seconds of communication by the window in which it may overlap. busy_s: the seconds of computing.
    """

    def exposed(seconds_by_window: Iterable[float], computing: float, window: float, lost_share: float) -> float:
        sums = [*itertools.accumulate(seconds_by_window)]
        pairs = zip(sums, _share_windows(cell).values(), strict=True)
        exposed_s = max(0.0, *(seconds - window * share * computing for seconds, share in pairs))
        return exposed_s + lost_share * (sums[-1] - exposed_s)

    times = hideable.values()
    return PredictedRange(
        exposed((time.low for time in times), busy_s.high, WINDOW.low, EXPOSED.low),
        exposed((time.likely for time in times), busy_s.likely, WINDOW.likely, EXPOSED.likely),
        exposed((time.high for time in times), busy_s.low, WINDOW.high, EXPOSED.high),
    )


def _bubble_over_compute(cell: Cell) -> float:
    """The time that the ranks of the pipeline wait, divided by the time that they compute."""
    if cell.pp == 1:
        return 0.0
    schedule = pipeline_share.read_schedule_name(cell)
    return pipeline_schedule.bubble_over_ideal(schedule, cell.pp, cell.gradient_accumulation_steps, cell.stages_per_rank)


def _predict_straggler_time(cell: Cell, step: PredictedRange) -> PredictedRange:
    """The seconds by which the slowest rank makes a step longer. A synchronous step takes as long as its slowest rank, which,
    of n ranks with normally distributed times, is about sqrt(2 ln n) standard deviations above the mean."""
    if cell.gpus == 1:
        return ZERO
    deviations = math.sqrt(2 * math.log(cell.gpus))
    return PredictedRange(
        step.low * STRAGGLER_DEVIATION.low * deviations,
        step.likely * STRAGGLER_DEVIATION.likely * deviations,
        step.high * STRAGGLER_DEVIATION.high * deviations,
    )


def ring_s(op: str, size: float, group_size: int, alpha_s: float, bandwidth: float) -> float:
    """The seconds that one collective of `size` bytes takes with the ring algorithm."""
    rounds = 2 if op == "all_reduce" else 1
    return rounds * ((group_size - 1) * alpha_s + (group_size - 1) / group_size * size / bandwidth)


def tree_s(op: str, size: float, group_size: int, alpha_s: float, bandwidth: float) -> float:
    """The seconds that one all-reduce or broadcast takes with the tree algorithm; infinite for other collectives."""
    if op not in ("all_reduce", "broadcast"):
        return math.inf
    rounds = 2 if op == "all_reduce" else 1
    return rounds * (math.ceil(math.log2(group_size)) * alpha_s + size / bandwidth)


def faster_s(op: str, size: float, group_size: int, alpha_s: float, bandwidth: float) -> float:
    """The seconds that one collective takes with the faster algorithm; 0 for a single rank, which exchanges nothing."""
    if group_size == 1:
        return 0.0
    if op == "send":
        return alpha_s + size / bandwidth
    return min(ring_s(op, size, group_size, alpha_s, bandwidth), tree_s(op, size, group_size, alpha_s, bandwidth))


def predict_exchange_time(exchange: Term, link: PlannedLink) -> PredictedRange:
    """The seconds that all calls of an exchange take in a step."""
    if not exchange.calls or exchange.ranks == 1:
        return PredictedRange(0.0, 0.0, 0.0)
    size = exchange.payload_bytes / exchange.calls

    def seconds(alpha_s: float, bandwidth: float) -> float:
        return exchange.calls * faster_s(exchange.op, size, exchange.ranks, alpha_s, bandwidth)

    # In the ranges of a link, `low` is the slowest case, which gives the longest time.
    return PredictedRange(
        seconds(link.alpha_s.high, link.bandwidth.high),
        seconds(link.alpha_s.likely, link.bandwidth.likely),
        seconds(link.alpha_s.low, link.bandwidth.low),
    )
