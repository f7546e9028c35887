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
MOST_SAVINGS = 3
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


def find_advice(runs: Sequence[RunAnswers], mean_count: int) -> list[Saving]:
    """At most MOST_SAVINGS changes of these runs, the largest saving first.

    mean_count: the number of ranks, or of their steps, over which the saved time is a mean.
    """
    ranks = [rank for run in runs for rank in run.ranks]
    profiled_ns = sum(rank.span_ns for rank in ranks)
    ns_by_part: dict[StepPart, int] = {}
    for run in runs:
        for rank_index, rank in enumerate(run.ranks):
            for step_part, part_ns in step_parts.divide_rank_time(rank, rank_index, run.waits).items():
                ns_by_part[step_part] = ns_by_part.get(step_part, 0) + part_ns
    if profiled_ns <= 0:
        return []
    savings = [*_advise_idle(ranks, ns_by_part), *_advise_communication(runs, ns_by_part), *_advise_work(ranks, ns_by_part)]
    largest_savings = sorted(savings, key=lambda saving: -saving[2])[:MOST_SAVINGS]
    return [
        Saving(subject, advice_text, round(part_ns / mean_count), 100 * part_ns / profiled_ns)
        for subject, advice_text, part_ns in largest_savings
        if part_ns and part_ns >= _LEAST_SHARE * profiled_ns
    ]


_Suggestion = tuple[Subject, str, int]


def _advise_idle(ranks: Sequence[RankAnalysis], ns_by_part: dict[StepPart, int]) -> Iterable[_Suggestion]:
    if launching_ns := ns_by_part.get(StepPart("idle", cause="launching"), 0):
        longest_call = max((calls for rank in ranks for calls in rank.work.launch_calls), key=lambda calls: calls.idle_ns)
        step_text = "" if longest_call.step is None else f" in step {longest_call.step}"
        remedy = (
            "The host waits for this copy: use pin_memory and non_blocking=True, and copy less often."
            if "Memcpy" in longest_call.call
            else "If it loads code, warm up first or set CUDA_MODULE_LOADING=EAGER; CUDA graphs and fewer launches help "
            "against many short calls."
        )
        advice_text = (
            f"The GPU is idle while the host is inside launching calls. The longest, {longest_call.call} of "
            f"{_shorten_name(longest_call.launched)}{step_text}, lasts {_format_ms(longest_call.call_ns)}. {remedy}"
        )
        yield "launching calls", advice_text, launching_ns
    if host_ns := ns_by_part.get(StepPart("idle", cause="host"), 0):
        data_ns = min(host_ns, sum(phase.host_ns for rank in ranks for phase in rank.phases if phase.phase == "data"))
        data = f"Up to {_format_ms(data_ns)} of it is reading data: use more workers." if data_ns > host_ns / 10 else ""
        is_compiled = any(_is_compiled(row) for rank in ranks for row in rank.work.operators)
        graphs = "CUDA graphs (torch.compile with mode='reduce-overhead')" if is_compiled else "torch.compile or CUDA graphs"
        remedy = (
            f"Use {graphs}, larger batches, and fewer synchronisations such as .item()."
            if any(rank.kind == "gpu" for rank in ranks)
            else "The main thread is in Python code outside of operators."
        )
        # Where most of the time is reading data, compiling the model cannot help.
        sentences = [data] if data_ns > host_ns / 2 else [data, remedy]
        advice_text = " ".join(["Nothing runs, because the host launches the next work too late.", *filter(None, sentences)])
        yield "late launches", advice_text, host_ns
    if queued_ns := ns_by_part.get(StepPart("idle", cause="other"), 0):
        advice_text = (
            "Work is queued, and the GPU does not start it: it waits for a copy, for another stream, or for another process. "
            "Look for blocking copies such as .item() and .cpu(), and for waits between streams."
        )
        yield "queued work", advice_text, queued_ns


def _advise_communication(runs: Sequence[RunAnswers], ns_by_part: dict[StepPart, int]) -> Iterable[_Suggestion]:
    exposed = {step_part: part_ns for step_part, part_ns in ns_by_part.items() if step_part.kind == "communication"}
    transfers = {step_part: part_ns for step_part, part_ns in exposed.items() if step_part.cause in (TRANSFER, UNMATCHED)}
    if transfers:
        longest_transfer = max(transfers, key=lambda step_part: transfers[step_part])
        advice_text = (
            f"Collectives run while nothing computes, {longest_transfer.of} the longest. Overlap them with compute "
            "(prefetching, buckets), or send fewer bytes."
        )
        yield "communication", advice_text, sum(transfers.values())
    if waiting_ns := sum(part_ns for step_part, part_ns in exposed.items() if step_part.cause == WAITING):
        straggler_names = dict.fromkeys(str(run.waits.straggler.rank) for run in runs if run.waits.straggler)
        named = f", most of all for rank {' and '.join(straggler_names)}" if straggler_names else ""
        yield ("slow ranks", f"Ranks wait in collectives for slow ranks{named}. Give all ranks the same work.", waiting_ns)


def _advise_work(ranks: Sequence[RankAnalysis], ns_by_part: dict[StepPart, int]) -> Iterable[_Suggestion]:
    """Changes of what a GPU computes and copies. No saving is longer than the time in which something computes."""
    gpu_ranks = [rank for rank in ranks if rank.kind == "gpu"]
    compute_ns = sum(rank.compute_ns for rank in gpu_ranks)
    if memory_ns := ns_by_part.get(StepPart("memory"), 0):
        text = "Copies and memory sets run while nothing computes. Use pin_memory and non_blocking=True, and leave out copies."
        yield "memory operations", text, memory_ns
    operator_rows = sum_operators(row for rank in gpu_ranks for row in rank.work.operators if row.kernel_ns)
    for subject, category, text in (
        (
            "fusion",
            "element-wise",
            "Element-wise kernels only read and write tensors. Fuse them, for example with torch.compile.",
        ),
        ("copies", "copies", "Kernels copy or cast tensors. Leave out casts, changes of layout and concatenations."),
    ):
        category_rows = [row for row in operator_rows if row.category == category and not _is_compiled(row)]
        if category_rows:
            longest = category_rows[0]
            longest_name = longest.operator or _shorten_name(longest.kernels[0])
            text += f" The longest is {longest_name}, {_format_ms(longest.kernel_ns or 0)}."
            yield subject, text, min(compute_ns, sum(row.kernel_ns or 0 for row in category_rows))  # type: ignore[misc]
    if math_ns := sum(use.total_ns or 0 for rank in gpu_ranks for use in rank.attention if use.backend == "math"):
        text = "Attention runs as plain products and softmax (math). Inputs of half precision without a mask can use flash."
        yield "attention", text, min(compute_ns, math_ns)
    elif plain_ns := _sum_plain_attention(operator_rows):
        text = (
            "A softmax between two batched products looks like attention written by hand. "
            "torch.nn.functional.scaled_dot_product_attention does not write the scores to memory."
        )
        yield "attention", text, min(compute_ns, plain_ns)
    yield from _advise_kernels(gpu_ranks, compute_ns)


def _advise_kernels(ranks: Sequence[RankAnalysis], compute_ns: int) -> Iterable[_Suggestion]:
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
        advice_text = "Matrix products compute in fp32: torch.set_float32_matmul_precision('high') allows TF32; or use bf16."
        yield "TF32", advice_text, min(compute_ns, tf32_ns)
    if slow:
        lost_ns_by_operator = {operator: sum(map(_compute_lost_ns, slow_rows)) for operator, slow_rows in slow.items()}
        operator = max(slow, key=lambda name: lost_ns_by_operator[name])
        least_ns, kernel_ns = (
            sum(numbers) for numbers in zip(*((row.least_ns or 0, row.kernel_ns or 0) for row in slow[operator]))
        )
        advice_text = (
            f"Kernels take longer than the peaks of the GPU allow. The largest loss is in {operator}, which reaches "
            f"{notation.format_number(100 * least_ns / kernel_ns, 2)} % of its bound: look at its shapes, layout and "
            "implementation, and fuse it with its neighbours."
        )
        yield "slow kernels", advice_text, min(compute_ns, sum(lost_ns_by_operator.values()))


def _is_compiled(row: OperatorTime) -> bool:
    """Whether torch.compile made the kernels of an operator."""
    return any(kernel.startswith("triton_") for kernel in row.kernels)


def _sum_plain_attention(operator_rows: Sequence[OperatorTime]) -> int:
    """The time of each softmax whose input is the result of a batched product and whose result is an input of another, with
    these products; 0 if there is none. The operators are compared by the number and the sizes of their matrices."""
    scores_made: dict[tuple[int, ...], list[OperatorTime]] = {}
    scores_used: dict[tuple[int, ...], list[OperatorTime]] = {}
    for row in operator_rows:
        input_shapes = _read_batched_shapes(row)[-2:]
        if row.operator.endswith(("::bmm", "::baddbmm")) and len(input_shapes) == 2:
            (batch_size, row_count, inner_size), (_, _, column_count) = (tensor[-3:] for tensor in input_shapes)
            scores_made.setdefault((batch_size, row_count, column_count), []).append(row)
            scores_used.setdefault((batch_size, row_count, inner_size), []).append(row)
    kernel_ns_by_row: dict[int, int] = {}
    for row in operator_rows:
        if row.operator.endswith(("::_softmax", "::softmax")) and (input_shapes := _read_batched_shapes(row)):
            sizes = (math.prod(input_shapes[0][:-2]), *input_shapes[0][-2:])
            if sizes in scores_made and sizes in scores_used:
                kernel_ns_by_row |= {id(part): part.kernel_ns or 0 for part in (row, *scores_made[sizes], *scores_used[sizes])}
    return sum(kernel_ns_by_row.values())


def _read_batched_shapes(row: OperatorTime) -> list[list[int]]:
    """The shapes of the inputs that have at least three dimensions."""
    shapes = json.loads(row.shapes) if row.shapes else []
    return [shape for shape in shapes if isinstance(shape, list) and len(shape) >= 3 and is_shape(shape)]


def _compute_lost_ns(row: OperatorTime) -> int:
    """The time that the kernels of an operator take above its bound."""
    return max(0, (row.kernel_ns or 0) - (row.least_ns or 0))


def _format_ms(time_ns: float) -> str:
    return f"{notation.format_number(time_ns / 1e6)} ms"


def _shorten_name(operator_name: str) -> str:
    return operator_name if len(operator_name) <= 60 else f"{operator_name[:59]}…"
