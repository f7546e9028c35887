"""Metrics of the calls and the time of a kernel, an operator or a class of operators, and of the difference from the
baseline."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric
from collect.metric_values import average_per_step
from collect.metrics.baseline_differences import subtract_baseline
from collect.traces.breakdown import Breakdown, EventTally


class OperatorClass(NamedTuple):
    """A class of kernels and operators, given by patterns of their names."""

    kernel_pattern: re.Pattern[str]
    """The pattern for kernels and memory operations of a GPU."""
    operator_pattern: re.Pattern[str] | None
    """The pattern for operators, which is used if there is no GPU; None if the class contains no operators."""


OPERATOR_CLASSES = {
    # Kineto names a copy by the driver such as `Memcpy DtoD (Device -> Device)`. The only operator that copies is aten::copy_.
    "memory copies": OperatorClass(re.compile(r"^Memcpy\b"), re.compile(r"^aten::copy_$")),
    # The kernel of pointwise operators on aligned memory (PyTorch, aten/src/ATen/native/cuda/CUDALoops.cuh).
    "vectorized kernels": OperatorClass(re.compile(r"(?<!\w)vectorized_elementwise_kernel(?!\w)"), None),
    # Names of cuBLAS kernels contain gemm (ampere_sgemm_..., sm80_xmma_gemm_..., cutlass_..._gemm_...) or begin with nvjet_.
    "GEMM": OperatorClass(re.compile(r"gemm|^nvjet_", re.IGNORECASE), re.compile(r"^aten::(mm|addmm|bmm|baddbmm)$")),
}

OF_MEANING = "`of` is a name in whole words, or the beginning of names followed by *, or a class: " + ", ".join(
    OPERATOR_CLASSES
)
EXAMPLE_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def count_operator_calls(run: LoadedRun, operator_name: str) -> Quantity | None:
    """The number of calls per step, as the mean over the ranks that were profiled by steps. operator_name: which kernels or
    operators (see OF_MEANING)."""
    return _average_calls_per_step(run, operator_name, "calls", lambda event_tally: event_tally.count)


def sum_operator_time(run: LoadedRun, operator_name: str) -> Quantity | None:
    """The time of the calls in ms per step, as the mean over the ranks that were profiled by steps. operator_name: which
    operators (see OF_MEANING)."""
    return _average_calls_per_step(run, operator_name, "ms", lambda event_tally: event_tally.total_ns / 1e6)


def find_name_pattern(name: str, trace_source: str) -> re.Pattern[str] | None:
    """The pattern to search for in the names of kernels (source `gpu`) or operators (other sources).

    None if `name` is a class without operators and the source is not `gpu`.

    name: the name of a class, or a part of the name of a kernel or operator. trace_source: `gpu`, `gloo` or `cpu`, see
    `Breakdown`.

    A name that is not a class must match whole words: CatArrayBatchedCopy does not match CatArrayBatchedCopy_contig. If the
    name ends in `*`, the last word may be longer, for names that the table of a study cuts off.
    """
    if name in OPERATOR_CLASSES:
        return OPERATOR_CLASSES[name].kernel_pattern if trace_source == "gpu" else OPERATOR_CLASSES[name].operator_pattern
    word_end = "" if name.endswith("*") else r"(?!\w)"
    return re.compile(rf"(?<!\w){re.escape(name.removesuffix('*'))}{word_end}")


def _average_calls_per_step(
    run: LoadedRun, operator_name: str, unit: str, measure_tally: Callable[[EventTally], float]
) -> Quantity | None:
    """The sum of `measure_tally` over all calls that match `operator_name`, per step, as the mean over the ranks that were
    profiled by steps.

    measure_tally: a function that returns the number of calls, or the time, of one kernel or operator.

    None if no rank was profiled by steps. If no kernel or operator matches `operator_name`: 0 if the traces contain GPU
    kernels; None if they contain operators, because `operator_name` may be the name of a kernel."""
    breakdowns = [breakdown for breakdown in run.breakdowns if breakdown.steps]

    def select_matching_tallies(breakdown: Breakdown) -> list[EventTally]:
        pattern = find_name_pattern(operator_name, breakdown.source)
        return [tally for tally in breakdown.kernels if pattern and pattern.search(tally.name)]

    if not any(map(select_matching_tallies, breakdowns)) and any(rank.source != "gpu" for rank in breakdowns):
        return None
    return average_per_step(breakdowns, lambda rank: sum(map(measure_tally, select_matching_tallies(rank))), unit)


METRICS = (
    Metric(
        name="operator_count",
        unit="calls",
        direction="neither",
        definition="Calls of a kernel (without a GPU: of an operator) in a profiled step; mean over the profiled "
        f"ranks. {OF_MEANING}.",
        of_run_at=count_operator_calls,
        argument="of",
        example=EXAMPLE_KERNEL,
    ),
    Metric(
        name="operator_ms",
        unit="ms",
        direction="lower is better",
        definition="Sum of the durations of a kernel's calls in a profiled step (without a GPU: of an operator, "
        "including all that it calls). Each of several calls at the same time counts fully. Mean over the profiled "
        f"ranks. {OF_MEANING}.",
        of_run_at=sum_operator_time,
        argument="of",
        example=EXAMPLE_KERNEL,
    ),
    Metric(
        name="operator_difference_ms",
        unit="ms",
        direction="lower is better",
        definition="operator_ms minus that of the baseline: the time that a strategy adds (study 2, section 4.5.1).",
        of_cells=lambda compared: subtract_baseline(compared, "ms"),
        compares="operator_ms",
        argument="of",
        example="GEMM",
    ),
)
