"""Says what to change in a profiled run: at most three things, each with the most time that the change could save.

The time is an upper bound: it is the time that would go if the cause went altogether and nothing else took its place. Savings
of several changes may overlap, so they are not added up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from collect.traces import step_parts
from collect.traces.input_shapes import is_shape
from collect.traces.operator_times import OperatorTime, sum_operators
from collect.traces.operator_work import compute_least_ns
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.run_answers import RunAnswers
from collect.traces.step_parts import TRANSFER, UNMATCHED, WAITING, StepPart
from shardlab.hardware.gpu_models import find_gpu_model
from shardlab.terminal import notation

Subject = Literal[
    "launching calls", "late launches", "queued work", "communication", "slow ranks", "memory operations", "TF32", "fusion",
    "copies", "attention", "slow kernels",
]  # fmt: skip
MOST_ADVICE = 3
_LEAST_SHARE = 0.01  # a change that saves less than this share of the time is not named
_BOUND_BY_FORMULA = ("matrix products", "convolution", "attention", "normalisation", "reduction")


class Saving(msgspec.Struct, frozen=True):
    """A change, and how much time it could save at most."""

    subject: Subject
    """What the change is about."""
    text: str
    """What takes the time, and what helps, as sentences."""
    saves_at_most_ns: int
    """The most time that the change could save, as the mean over ranks."""
    share_pct: float
    """This time as a share of the profiled time."""


def find_advice(runs: Sequence[RunAnswers], parts_count: int) -> list[Saving]:
    """At most MOST_ADVICE changes of these runs, the largest saving first.

    parts_count: the number of ranks, or of their steps, over which the saved time is a mean.
    """
    ranks = [rank for run in runs for rank in run.ranks]
    span_ns = sum(rank.span_ns for rank in ranks)
    parts: dict[StepPart, int] = {}
    for run in runs:
        for index, rank in enumerate(run.ranks):
            for part, ns in step_parts.divide_rank_time(rank, index, run.waits).items():
                parts[part] = parts.get(part, 0) + ns
    if span_ns <= 0:
        return []
    savings = [*_save_idle(ranks, parts), *_save_communication(runs, parts), *_save_work(ranks, parts)]
    largest = sorted(savings, key=lambda saving: -saving[2])[:MOST_ADVICE]
    return [
        Saving(subject, text, round(ns / parts_count), 100 * ns / span_ns)
        for subject, text, ns in largest
        if ns and ns >= _LEAST_SHARE * span_ns
    ]


_Candidate = tuple[Subject, str, int]


def _save_idle(ranks: Sequence[RankAnalysis], parts: dict[StepPart, int]) -> Iterable[_Candidate]:
    if launching_ns := parts.get(StepPart("idle", cause="launching"), 0):
        longest = max((calls for rank in ranks for calls in rank.work.launch_calls), key=lambda calls: calls.idle_ns)
        step = "" if longest.step is None else f" in step {longest.step}"
        remedy = (
            "The host waits for this copy: use pin_memory and non_blocking=True, and copy less often."
            if "Memcpy" in longest.call
            else "If it loads code, warm up first or set CUDA_MODULE_LOADING=EAGER; CUDA graphs and fewer launches help "
            "against many short calls."
        )
        text = (
            f"The GPU is idle while the host is inside launching calls. The longest, {longest.call} of "
            f"{_shorten(longest.launched)}{step}, lasts {_ms(longest.call_ns)}. {remedy}"
        )
        yield "launching calls", text, launching_ns
    if host_ns := parts.get(StepPart("idle", cause="host"), 0):
        data_ns = min(host_ns, sum(phase.host_ns for rank in ranks for phase in rank.phases if phase.phase == "data"))
        data = f"Up to {_ms(data_ns)} of it is reading data: use more workers." if data_ns > host_ns / 10 else ""
        is_compiled = any(_is_compiled(row) for rank in ranks for row in rank.work.operators)
        graphs = "CUDA graphs (torch.compile with mode='reduce-overhead')" if is_compiled else "torch.compile or CUDA graphs"
        remedy = (
            f"Use {graphs}, larger batches, and fewer synchronisations such as .item()."
            if any(rank.kind == "gpu" for rank in ranks)
            else "The main thread is in Python code outside of operators."
        )
        # Where most of the time is reading data, compiling the model cannot help.
        sentences = [data] if data_ns > host_ns / 2 else [data, remedy]
        text = " ".join(["Nothing runs, because the host launches the next work too late.", *filter(None, sentences)])
        yield "late launches", text, host_ns
    if queued_ns := parts.get(StepPart("idle", cause="other"), 0):
        text = (
            "Work is queued, and the GPU does not start it: it waits for a copy, for another stream, or for another process. "
            "Look for blocking copies such as .item() and .cpu(), and for waits between streams."
        )
        yield "queued work", text, queued_ns


def _save_communication(runs: Sequence[RunAnswers], parts: dict[StepPart, int]) -> Iterable[_Candidate]:
    exposed = {part: ns for part, ns in parts.items() if part.kind == "communication"}
    transfers = {part: ns for part, ns in exposed.items() if part.cause in (TRANSFER, UNMATCHED)}
    if transfers:
        longest = max(transfers, key=lambda part: transfers[part])
        text = (
            f"Collectives run while nothing computes, {longest.of} the longest. Overlap them with compute (prefetching, "
            "buckets), or send fewer bytes."
        )
        yield "communication", text, sum(transfers.values())
    if waiting_ns := sum(ns for part, ns in exposed.items() if part.cause == WAITING):
        stragglers = dict.fromkeys(str(run.waits.straggler.rank) for run in runs if run.waits.straggler)
        named = f", most of all for rank {' and '.join(stragglers)}" if stragglers else ""
        yield "slow ranks", f"Ranks wait in collectives for slow ranks{named}. Give all ranks the same work.", waiting_ns


def _save_work(ranks: Sequence[RankAnalysis], parts: dict[StepPart, int]) -> Iterable[_Candidate]:
    """Changes of what a GPU computes and copies. No saving is longer than the time in which something computes."""
    gpu_ranks = [rank for rank in ranks if rank.kind == "gpu"]
    compute_ns = sum(rank.compute_ns for rank in gpu_ranks)
    if memory_ns := parts.get(StepPart("memory"), 0):
        text = "Copies and memory sets run while nothing computes. Use pin_memory and non_blocking=True, and leave out copies."
        yield "memory operations", text, memory_ns
    operators = sum_operators(row for rank in gpu_ranks for row in rank.work.operators if row.kernel_ns)
    for subject, category, text in (
        (
            "fusion",
            "element-wise",
            "Element-wise kernels only read and write tensors. Fuse them, for example with torch.compile.",
        ),
        ("copies", "copies", "Kernels copy or cast tensors. Leave out casts, changes of layout and concatenations."),
    ):
        rows = [row for row in operators if row.category == category and not _is_compiled(row)]
        if rows:
            text += f" The longest is {rows[0].operator or _shorten(rows[0].kernels[0])}, {_ms(rows[0].kernel_ns or 0)}."
            yield subject, text, min(compute_ns, sum(row.kernel_ns or 0 for row in rows))  # type: ignore[misc]
    if math_ns := sum(use.total_ns or 0 for rank in gpu_ranks for use in rank.attention if use.backend == "math"):
        text = "Attention runs as plain products and softmax (math). Inputs of half precision without a mask can use flash."
        yield "attention", text, min(compute_ns, math_ns)
    elif plain_ns := _sum_plain_attention(operators):
        text = (
            "A softmax between two batched products looks like attention written by hand. "
            "torch.nn.functional.scaled_dot_product_attention does not write the scores to memory."
        )
        yield "attention", text, min(compute_ns, plain_ns)
    yield from _save_below_peak(gpu_ranks, compute_ns)


def _save_below_peak(ranks: Sequence[RankAnalysis], compute_ns: int) -> Iterable[_Candidate]:
    """What kernels take longer than the peaks of the data sheet allow: products that could use TF32, and others."""
    tf32_ns = 0
    slow: dict[str, list[OperatorTime]] = {}
    for rank in ranks:
        gpu = find_gpu_model(rank.gpu)
        for row in rank.work.operators:
            if row.category not in _BOUND_BY_FORMULA or row.least_ns is None or not row.kernel_ns:
                continue
            if row.category == "matrix products" and row.precision == "fp32" and gpu and (gpu.tf32 or 0) > gpu.fp32:
                tf32_ns += max(0, row.kernel_ns - (compute_least_ns(row.flops, row.bytes, rank.gpu, "tf32") or 0))
            else:
                slow.setdefault(row.operator, []).append(row)
    if tf32_ns:
        text = "Matrix products compute in fp32: torch.set_float32_matmul_precision('high') allows TF32; or use bf16."
        yield "TF32", text, min(compute_ns, tf32_ns)
    if slow:
        lost_ns = {operator: sum(map(_lost_ns, rows)) for operator, rows in slow.items()}
        operator = max(slow, key=lambda name: lost_ns[name])
        least_ns, kernel_ns = (
            sum(numbers) for numbers in zip(*((row.least_ns or 0, row.kernel_ns or 0) for row in slow[operator]))
        )
        text = (
            f"Kernels take longer than the peaks of the GPU allow. The largest loss is in {operator}, which reaches "
            f"{notation.format_number(100 * least_ns / kernel_ns, 2)} % of its bound: look at its shapes, layout and "
            "implementation, and fuse it with its neighbours."
        )
        yield "slow kernels", text, min(compute_ns, sum(lost_ns.values()))


def _is_compiled(row: OperatorTime) -> bool:
    """Whether torch.compile made the kernels of an operator."""
    return any(kernel.startswith("triton_") for kernel in row.kernels)


def _sum_plain_attention(operators: Sequence[OperatorTime]) -> int:
    """The time of each softmax whose input is the result of a batched product and whose result is an input of another, with
    these products; 0 if there is none. The operators are compared by the number and the sizes of their matrices."""
    scores_made: dict[tuple[int, ...], list[OperatorTime]] = {}
    scores_used: dict[tuple[int, ...], list[OperatorTime]] = {}
    for row in operators:
        tensors = _read_shapes(row)[-2:]
        if row.operator.endswith(("::bmm", "::baddbmm")) and len(tensors) == 2:
            (count, rows, inner), (_, _, columns) = (tensor[-3:] for tensor in tensors)
            scores_made.setdefault((count, rows, columns), []).append(row)
            scores_used.setdefault((count, rows, inner), []).append(row)
    kernel_ns_by_row: dict[int, int] = {}
    for row in operators:
        if row.operator.endswith(("::_softmax", "::softmax")) and (tensors := _read_shapes(row)):
            sizes = (math.prod(tensors[0][:-2]), *tensors[0][-2:])
            if sizes in scores_made and sizes in scores_used:
                kernel_ns_by_row |= {id(part): part.kernel_ns or 0 for part in (row, *scores_made[sizes], *scores_used[sizes])}
    return sum(kernel_ns_by_row.values())


def _read_shapes(row: OperatorTime) -> list[list[int]]:
    """The shapes of the inputs that have at least three dimensions."""
    shapes = json.loads(row.shapes) if row.shapes else []
    return [shape for shape in shapes if isinstance(shape, list) and len(shape) >= 3 and is_shape(shape)]


def _lost_ns(row: OperatorTime) -> int:
    """The time that the kernels of an operator take above its bound."""
    return max(0, (row.kernel_ns or 0) - (row.least_ns or 0))


def _ms(ns: float) -> str:
    return f"{notation.format_number(ns / 1e6)} ms"


def _shorten(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:59]}…"
