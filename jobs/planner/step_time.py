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
BACKWARD_SHARE = 2 / 3
# WINDOW_SHARE: the share of the computing time in which communication can be hidden. EXPOSED_SHARE: the share of hidden
# communication by which it makes a step longer nevertheless: a part at the ends of passes does not overlap, and its kernels
# take multiprocessors and bandwidth of the memory from computing. Both have three values: for the fastest, the likely and the
# slowest step. Study 2, section 4.5.4: 92.5 % of DDP's all-reduces and 95.1 % and 98.1 % of FSDP's all-gathers overlap with
# computing. What computing loses is fitted to benchmarks/published.
WINDOW_SHARE = PredictedRange(0.95, 0.85, 0.6)
EXPOSED_SHARE = PredictedRange(0.03, 0.15, 0.35)
# The share of bandwidth that a network loses each time the number of nodes doubles, by congestion and by the latency of more
# hops. Fernandez et al., 2024 (arXiv 2411.13055), all-reduces on 4 to 512 DGX H100: 0.6 % with 16 GiB, 2 % with 1 GiB, 6 % with
# 128 MiB. llm-foundry on H100 loses 5 to 10 % of its throughput from 16 to 64 nodes.
CONGESTION_LOSS = PredictedRange(0.0, 0.02, 0.06)
STRAGGLER_DEVIATION = PredictedRange(0.0, 0.01, 0.03)  # standard deviation of a rank's step time, divided by the mean; assumed
UPDATE_BYTES = {True: 28, False: 72}  # bytes per parameter that Adam in fp32 reads and writes; True: the fused optimizer

# The time of a collective follows the alpha-beta model, by algorithm (Thakur et al., 2005; Patarasuk and Yuan, 2009). Seconds
# for n ranks and S bytes, if a hop (a message from one rank to the next) takes alpha seconds, and the bus bandwidth is B:
#
#     ring   all-reduce 2(n-1) alpha + 2 (n-1)/n S/B; all-gather, reduce-scatter (n-1) alpha + (n-1)/n S/B
#     tree   all-reduce 2 ceil(log2 n) alpha + 2 S/B (reduce, then broadcast, pipelined)
#     send   alpha + S/B
#
# NCCL chooses the faster algorithm for each size, and so does `predict_faster_s`.


class PredictedStepTime(msgspec.Struct, frozen=True):
    """The predicted time of a step in seconds."""

    parts_s: dict[str, PredictedRange]
    """Its parts by name, which add up to the step."""
    communication_s: PredictedRange
    """The time of all communication, hidden or not."""
    links: tuple[PlannedLink, ...]
    """The links that the communication uses."""

    @property
    def step_s(self) -> PredictedRange:
        """The time of the whole step."""
        return sum_ranges(self.parts_s)

    @property
    def bottleneck(self) -> str:
        """The name of the part of the step that takes the longest time."""
        return max(self.parts_s, key=lambda name: self.parts_s[name].likely)


def predict_step_time(cell: Cell, machine: PlannedMachine) -> PredictedStepTime | None:
    """The time of a step; None if a part of it is not known: the GPU, the operations, the exchanges or a link."""
    facts = model_facts.find_model_facts(cell)
    if machine.gpu_model is None or facts.flops_per_item is None or (known_exchanges := exchanges.list_exchanges(cell)) is None:
        return None
    linked_exchanges = [(exchange, find_group_link(cell, exchange.axis, machine)) for exchange in known_exchanges]
    computing_time = compute_time.predict_compute_time(cell, facts, machine.gpu_model)
    if computing_time is None or any(link is None for _, link in linked_exchanges):
        return None
    pass_count = cell.gradient_accumulation_steps
    compute_s = (computing_time.blocks_s + computing_time.head_s).times(pass_count)
    launch_s = _predict_launch_time(cell, facts, compute_s)
    update_s = _predict_update_time(cell, facts, machine.gpu_model)
    unhideable_s, hideable_s = ZERO, dict.fromkeys(_share_windows(cell), ZERO)
    for exchange, link in linked_exchanges:
        assert link is not None
        exchange_s = predict_exchange_time(exchange, link)
        if exchange.hides_in is None:
            unhideable_s += exchange_s
        else:
            hideable_s[exchange.hides_in] += exchange_s
    busy_s = compute_s + launch_s
    exposed_s = unhideable_s + _predict_exposed_time(cell, hideable_s, busy_s)
    # The last stage, which has the head, sets the pace, and all stages wait as long as passes through blocks take.
    bubble_s = (computing_time.blocks_s.times(pass_count) + launch_s).times(_compute_bubble_share(cell))
    return PredictedStepTime(
        {
            "compute": compute_s,
            "launches": launch_s,
            "optimizer": update_s,
            "communication": exposed_s,
            "bubble": bubble_s,
            "stragglers": _predict_straggler_time(cell, busy_s + update_s + exposed_s + bubble_s),
        },
        sum_ranges(hideable_s) + unhideable_s,
        tuple({link.name: link for _, link in linked_exchanges if link is not None}.values()),
    )


def find_group_link(cell: Cell, axis: Axis, machine: PlannedMachine) -> PlannedLink | None:
    """The link of one group of ranks along an axis; None if it is not known. Consecutive ranks differ in tp first, then in dp,
    then in pp, and fill one node after another. Several groups of a node share its network, and a group uses no more of the
    network than its GPUs bring to the network cards."""
    ranks_per_node = -(-cell.gpus // cell.nnodes)
    ranks_spanned = {"tp": cell.tp, "dp": cell.tp * cell.shards, "replicas": cell.tp * cell.dp, "pp": cell.gpus}[axis]
    if ranks_spanned <= ranks_per_node or machine.link_between_nodes is None:
        return machine.link_inside_node if ranks_spanned <= ranks_per_node else None
    rank_stride = {"tp": 1, "dp": cell.tp, "replicas": cell.tp * cell.shards, "pp": cell.tp * cell.dp}[axis]
    groups_per_node, doublings = max(1, min(rank_stride, ranks_per_node)), math.log2(cell.nnodes)
    rates_per_s = [
        bytes_per_s * (1 - lost_share) ** doublings / groups_per_node
        for bytes_per_s, lost_share in zip(
            msgspec.structs.astuple(machine.link_between_nodes.bytes_per_s),
            (CONGESTION_LOSS.high, CONGESTION_LOSS.likely, CONGESTION_LOSS.low),
            strict=True,
        )
    ]
    if machine.link_inside_node is not None:
        rates_per_s = [
            min(bandwidth_pair)
            for bandwidth_pair in zip(rates_per_s, msgspec.structs.astuple(machine.link_inside_node.bytes_per_s), strict=True)
        ]
    return msgspec.structs.replace(machine.link_between_nodes, bytes_per_s=PredictedRange(*rates_per_s))


def _predict_launch_time(cell: Cell, facts: ModelFacts, compute_s: PredictedRange) -> PredictedRange:
    """The seconds in a step that the GPU waits until the host starts operators. compute_s: the seconds that it computes."""
    pass_count = cell.gradient_accumulation_steps
    operator_count = (
        pass_count * device_profile.OPERATORS_PER_BLOCK * max(1, facts.block_count / cell.pp) * (0.3 if cell.compile else 1.0)
    )
    launch_s = device_profile.OPERATOR_LAUNCH_S.times(operator_count)
    launch_compute_pairs = ((launch_s.low, compute_s.low), (launch_s.likely, compute_s.likely), (launch_s.high, compute_s.high))
    return PredictedRange(*sorted(max(0.0, started_s - computed_s) for started_s, computed_s in launch_compute_pairs))


def _predict_update_time(cell: Cell, facts: ModelFacts, gpu_model: GpuModel) -> PredictedRange:
    """The seconds of the optimizer and of the copies of weights for computing. Both are limited by the memory bandwidth."""
    division = sharding.divide_model(cell, facts.parameters)
    if not division.optimizer_ranks:
        return ZERO  # the optimizer runs on the CPU, whose time is not predicted
    rank_parameters = facts.parameters / (cell.tp * cell.pp)
    moved_bytes = UPDATE_BYTES[cell.optimizer.fused] if cell.optimizer.name != "sgd" else 20 if cell.optimizer.momentum else 12
    moved_bytes = moved_bytes // 2 if cell.precision == "bf16-pure" else moved_bytes
    copied_bytes = 6 if division.copy_bytes else 0
    total_bytes = rank_parameters * (moved_bytes / division.optimizer_ranks + copied_bytes)
    return compute_time.divide_by_rate(total_bytes, device_profile.STREAMED_SHARE.times(gpu_model.memory_gb_per_s * 1e9))


def _share_windows(cell: Cell) -> dict[str, float]:
    """The share of each window in the computing of a step. Each window contains the windows before it."""
    return {"last_backward": BACKWARD_SHARE / cell.gradient_accumulation_steps, "backward": BACKWARD_SHARE, "step": 1.0}


def _predict_exposed_time(cell: Cell, hideable_s: dict[str, PredictedRange], busy_s: PredictedRange) -> PredictedRange:
    """The seconds by which communication makes a step longer, although it may overlap with computing.

    hideable_s: the seconds of communication by the window in which it may overlap. busy_s: the seconds of computing.
    """

    def predict_exposed_s(
        seconds_by_window: Iterable[float], computing_s: float, window_share: float, lost_share: float
    ) -> float:
        cumulated_s = [*itertools.accumulate(seconds_by_window)]
        window_pairs = zip(cumulated_s, _share_windows(cell).values(), strict=True)
        exposed_s = max(0.0, *(seconds - window_share * share * computing_s for seconds, share in window_pairs))
        return exposed_s + lost_share * (cumulated_s[-1] - exposed_s)

    window_times = hideable_s.values()
    return PredictedRange(
        predict_exposed_s((window_time.low for window_time in window_times), busy_s.high, WINDOW_SHARE.low, EXPOSED_SHARE.low),
        predict_exposed_s(
            (window_time.likely for window_time in window_times), busy_s.likely, WINDOW_SHARE.likely, EXPOSED_SHARE.likely
        ),
        predict_exposed_s(
            (window_time.high for window_time in window_times), busy_s.low, WINDOW_SHARE.high, EXPOSED_SHARE.high
        ),
    )


def _compute_bubble_share(cell: Cell) -> float:
    """The time that the ranks of the pipeline wait, divided by the time that they compute."""
    if cell.pp == 1:
        return 0.0
    schedule_name = pipeline_share.read_schedule_name(cell)
    return pipeline_schedule.compute_bubble_ratio(
        schedule_name, cell.pp, cell.gradient_accumulation_steps, cell.stages_per_rank
    )


def _predict_straggler_time(cell: Cell, step_s: PredictedRange) -> PredictedRange:
    """The seconds by which the slowest rank makes a step longer. A synchronous step takes as long as its slowest rank, which,
    of n ranks with normally distributed times, is about sqrt(2 ln n) standard deviations above the mean."""
    if cell.gpus == 1:
        return ZERO
    deviation_count = math.sqrt(2 * math.log(cell.gpus))
    return PredictedRange(
        step_s.low * STRAGGLER_DEVIATION.low * deviation_count,
        step_s.likely * STRAGGLER_DEVIATION.likely * deviation_count,
        step_s.high * STRAGGLER_DEVIATION.high * deviation_count,
    )


def predict_ring_s(operation: str, payload_bytes: float, group_size: int, alpha_s: float, bytes_per_s: float) -> float:
    """The seconds that one collective of `payload_bytes` bytes takes with the ring algorithm."""
    round_count = 2 if operation == "all_reduce" else 1
    return round_count * ((group_size - 1) * alpha_s + (group_size - 1) / group_size * payload_bytes / bytes_per_s)


def predict_tree_s(operation: str, payload_bytes: float, group_size: int, alpha_s: float, bytes_per_s: float) -> float:
    """The seconds that one all-reduce or broadcast takes with the tree algorithm; infinite for other collectives."""
    if operation not in ("all_reduce", "broadcast"):
        return math.inf
    round_count = 2 if operation == "all_reduce" else 1
    return round_count * (math.ceil(math.log2(group_size)) * alpha_s + payload_bytes / bytes_per_s)


def predict_faster_s(operation: str, payload_bytes: float, group_size: int, alpha_s: float, bytes_per_s: float) -> float:
    """The seconds that one collective takes with the faster algorithm; 0 for a single rank, which exchanges nothing."""
    if group_size == 1:
        return 0.0
    if operation == "send":
        return alpha_s + payload_bytes / bytes_per_s
    return min(
        predict_ring_s(operation, payload_bytes, group_size, alpha_s, bytes_per_s),
        predict_tree_s(operation, payload_bytes, group_size, alpha_s, bytes_per_s),
    )


def predict_exchange_time(exchange: Term, link: PlannedLink) -> PredictedRange:
    """The seconds that all calls of an exchange take in a step."""
    if not exchange.calls or exchange.ranks == 1:
        return PredictedRange(0.0, 0.0, 0.0)
    call_bytes = exchange.payload_bytes / exchange.calls

    def predict_s(alpha_s: float, bytes_per_s: float) -> float:
        return exchange.times * exchange.calls * predict_faster_s(exchange.op, call_bytes, exchange.ranks, alpha_s, bytes_per_s)

    # In the ranges of a link, `low` is the slowest case, which gives the longest time.
    return PredictedRange(
        predict_s(link.alpha_s.high, link.bytes_per_s.high),
        predict_s(link.alpha_s.likely, link.bytes_per_s.likely),
        predict_s(link.alpha_s.low, link.bytes_per_s.low),
    )
