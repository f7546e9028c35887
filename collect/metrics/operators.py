"""Metrics of the calls and the time of a kernel, an operator or a class of operators, and of the difference from the
baseline."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Compared, Metric
from collect.metrics.baseline_differences import more
from collect.traces.breakdown import EventTally


class OperatorClass(NamedTuple):
    """A class of kernels and operators, given by patterns of their names.

    kernels: the pattern for kernels and memory operations of a GPU. operators: the pattern for operators, which is used if
    there is no GPU; None if the class contains no operators.
    """

    kernels: re.Pattern[str]
    operators: re.Pattern[str] | None


CLASSES = {
    # Kineto names a copy by the driver such as `Memcpy DtoD (Device -> Device)`. The only operator that copies is aten::copy_.
    "memory copies": OperatorClass(re.compile(r"^Memcpy\b"), re.compile(r"^aten::copy_$")),
    # The kernel of pointwise operators on aligned memory (PyTorch, aten/src/ATen/native/cuda/CUDALoops.cuh).
    "vectorized kernels": OperatorClass(re.compile(r"(?<!\w)vectorized_elementwise_kernel(?!\w)"), None),
    # Names of cuBLAS kernels contain gemm (ampere_sgemm_..., sm80_xmma_gemm_..., cutlass_..._gemm_...) or begin with nvjet_.
    "GEMM": OperatorClass(re.compile(r"gemm|^nvjet_", re.IGNORECASE), re.compile(r"^aten::(mm|addmm|bmm|baddbmm)$")),
}

OF = "`of` is a name in whole words, or the beginning of names followed by *, or a class: " + ", ".join(CLASSES)
EXAMPLE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def calls(run: LoadedRun, of: str) -> Quantity | None:
    """The number of calls per step, as the mean over the ranks that were profiled by steps. of: which kernels or operators
    (see OF)."""
    return _a_step(run, of, "calls", lambda one: one.count)


def time(run: LoadedRun, of: str) -> Quantity | None:
    """The time of the calls in ms per step, as the mean over the ranks that were profiled by steps. of: which operators (see
    OF)."""
    return _a_step(run, of, "ms", lambda one: one.total_ns / 1e6)


def find_pattern(of: str, source: str) -> re.Pattern[str] | None:
    """The pattern to search for in the names of kernels (source `gpu`) or operators (other sources).

    None if `of` is a class without operators and the source is not `gpu`.

    of: the name of a class, or a part of the name of a kernel or operator. source: `gpu`, `gloo` or `cpu`, see `Breakdown`.

    A name that is not a class must match whole words: CatArrayBatchedCopy does not match CatArrayBatchedCopy_contig. If the
    name ends in `*`, the last word may be longer, for names that the table of a study cuts off.
    """
    if of in CLASSES:
        return CLASSES[of].kernels if source == "gpu" else CLASSES[of].operators
    end = "" if of.endswith("*") else r"(?!\w)"
    return re.compile(rf"(?<!\w){re.escape(of.removesuffix('*'))}{end}")


def _a_step(run: LoadedRun, of: str, unit: str, size: Callable[[EventTally], float]) -> Quantity | None:
    """The sum of `size` over all calls that match `of`, per step, as the mean over the ranks that were profiled by steps.

    size: a function that returns the number of calls, or the time, of one kernel or operator.

    None if no rank was profiled by steps. If no kernel or operator matches `of`: 0 if the traces contain GPU kernels; None if
    they contain operators, because `of` may be the name of a kernel.
    """
    ranks = [one for one in run.breakdowns if one.steps]
    wanted = [find_pattern(of, one.source) for one in ranks]
    found = [[each for each in one.kernels if look and look.search(each.name)] for one, look in zip(ranks, wanted, strict=True)]
    if not ranks or (not any(found) and any(one.source != "gpu" for one in ranks)):
        return None
    shares = [sum(map(size, each)) / one.steps for one, each in zip(ranks, found, strict=True)]
    return Quantity(sum(shares) / len(shares), unit, ranks[0].kind)


def difference(compared: Compared) -> Quantity | None:
    """The time of the operators in the cell minus their time in the baseline, in ms."""
    return more(compared, "ms")


METRICS = (
    Metric(
        name="operator_count",
        unit="calls",
        direction="neither",
        definition=f"Calls of a kernel (without a GPU: of an operator) in a profiled step; mean over the profiled ranks. {OF}.",
        of_run_at=calls,
        argument="of",
        example=EXAMPLE,
    ),
    Metric(
        name="operator_ms",
        unit="ms",
        direction="lower is better",
        definition="Sum of the durations of a kernel's calls in a profiled step (without a GPU: of an operator, including all "
        f"that it calls). Each of several calls at the same time counts fully. Mean over the profiled ranks. {OF}.",
        of_run_at=time,
        argument="of",
        example=EXAMPLE,
    ),
    Metric(
        name="operator_difference_ms",
        unit="ms",
        direction="lower is better",
        definition="operator_ms minus that of the baseline: the time that a strategy adds (study 2, section 4.5.1).",
        of_cells=difference,
        compares="operator_ms",
        argument="of",
        example="GEMM",
    ),
)
