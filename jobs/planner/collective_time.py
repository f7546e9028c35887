"""The time of a collective in the alpha-beta model, by algorithm (Thakur et al., 2005; Patarasuk and Yuan, 2009).

Seconds for n ranks and S bytes, if a hop (a message from one rank to the next) takes alpha seconds, and the bus bandwidth is B:

    ring   all-reduce 2(n-1) alpha + 2 (n-1)/n S/B; all-gather, reduce-scatter (n-1) alpha + (n-1)/n S/B
    tree   all-reduce 2 ceil(log2 n) alpha + 2 S/B (reduce, then broadcast, pipelined)
    send   alpha + S/B

NCCL chooses the faster algorithm for each size, and so does the function `faster_s` of this module.
"""

from __future__ import annotations

import math

from jobs.planner.exchanges import Exchange
from jobs.planner.link import PlannedLink
from shardlab.prediction import PredictedRange


def ring(op: str, size: float, ranks: int, alpha_s: float, bandwidth: float) -> float:
    """The seconds that one collective of `size` bytes takes with the ring algorithm."""
    rounds = 2 if op == "all_reduce" else 1
    return rounds * ((ranks - 1) * alpha_s + (ranks - 1) / ranks * size / bandwidth)


def tree(op: str, size: float, ranks: int, alpha_s: float, bandwidth: float) -> float:
    """The seconds that one all-reduce or broadcast takes with the tree algorithm; infinite for other collectives."""
    if op not in ("all_reduce", "broadcast"):
        return math.inf
    rounds = 2 if op == "all_reduce" else 1
    return rounds * (math.ceil(math.log2(ranks)) * alpha_s + size / bandwidth)


def faster_s(op: str, size: float, ranks: int, alpha_s: float, bandwidth: float) -> float:
    """The seconds that one collective takes with the faster algorithm; 0 for a single rank, which exchanges nothing."""
    if ranks == 1:
        return 0.0
    if op == "send":
        return alpha_s + size / bandwidth
    return min(ring(op, size, ranks, alpha_s, bandwidth), tree(op, size, ranks, alpha_s, bandwidth))


def of(exchange: Exchange, over: PlannedLink, rings: int = 1) -> PredictedRange:
    """The seconds that all calls of an exchange take in a step. rings: the number of groups of ranks on one node that use the
    link at the same time."""
    if not exchange.calls or exchange.ranks == 1:
        return PredictedRange(0.0, 0.0, 0.0)
    size = exchange.payload_bytes / exchange.calls

    def seconds(alpha_s: float, bandwidth: float) -> float:
        return exchange.calls * faster_s(exchange.op, size, exchange.ranks, alpha_s, bandwidth / rings)

    # In the ranges of a link, `low` is the slowest case, which gives the longest time.
    return PredictedRange(
        seconds(over.alpha_s.high, over.bandwidth.high),
        seconds(over.alpha_s.likely, over.bandwidth.likely),
        seconds(over.alpha_s.low, over.bandwidth.low),
    )
