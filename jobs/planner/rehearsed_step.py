"""Predicts memory and traffic of a step from a rehearsal of the step, and how far the prediction may be wrong.

A rehearsal gives the bytes of tensors exactly as the operators of a CPU allocate them (shardlab/rehearsed.py). On a GPU, other
operators run; `gpu_operators` in terms.yaml has the range of the difference. A rehearsal does not contain the CUDA context,
NCCL's buffers and fragmentation, so they are the same terms as in the formula.
"""

from __future__ import annotations

import msgspec

from jobs.planner import exchanges, memory
from shardlab.cell import Cell
from shardlab.prediction import PredictedRange, total
from shardlab.rehearsed import Rehearsed, RehearsedCollective, RehearsedRank

FACTORS = {**exchanges.FACTORS, "all_to_all": 1.0}  # over n ranks, a rank sends factor x (n-1)/n bytes per byte of the tensor
UNMEASURED_PCT = 8.0  # the error of a rehearsal whose error was never measured; the limit that the tests allow


def by_category(cell: Cell, answer: Rehearsed, *, on_gpu: bool) -> dict[str, PredictedRange]:
    """The bytes of each category at the peak, on the rank that needs most memory. on_gpu: whether ranks have GPUs."""
    error = (UNMEASURED_PCT if answer.error_pct is None else answer.error_pct) / 100
    other = memory.terms()["gpu_operators"]
    low, high = (1 + other.low, 1 + other.high) if on_gpu else (1.0, 1.0)
    peak = msgspec.structs.asdict(answer.worst.at_peak)
    found = {
        name: PredictedRange(size * low * (1 - error), size, size * high * (1 + error)) for name, size in peak.items() if size
    }
    return {**found, **memory.beside_tensors(cell, total(found))} if on_gpu else found


def busiest(answer: Rehearsed) -> RehearsedRank | None:
    """The rank that sends most bytes; None if the collectives of a rank could not be counted."""
    if any(rank.collectives is None for rank in answer.ranks):
        return None
    return max(answer.ranks, key=sent_bytes)


def sent_bytes(rank: RehearsedRank) -> float:
    """The bytes that a rank sends in a step, if every collective uses the ring algorithm."""
    return sum(map(_sent, rank.collectives or ()))


def _sent(call: RehearsedCollective) -> float:
    share = 1.0 if call.op == "send" else FACTORS[call.op] * (call.ranks - 1) / call.ranks
    return call.times * call.payload_bytes * share


def in_words(answer: Rehearsed, *, on_gpu: bool) -> str:
    """A clause that says how the rehearsal was made, for the explanation of a prediction."""
    depths = "" if answer.depths is None else f", extrapolated from {answer.depths[0]} and {answer.depths[1]} blocks"
    error = "error never measured"
    if answer.error_pct is not None:
        error = f"largest measured error {answer.error_pct:g} %, {answer.error_from}"
    gpu = "; operators of a GPU may need other memory, never measured" if on_gpu else ""
    remarks = "".join(f"; {remark.rstrip('.')}" for remark in answer.remarks)
    return f"rehearsed on {answer.how.replace('_', ' ')} of a {answer.device.upper()}{depths} ({error}{gpu}{remarks})"
