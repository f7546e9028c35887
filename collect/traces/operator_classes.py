"""Finds the kernels and operators that a name in a study means: a single kernel or operator, or a class such as GEMM."""

from __future__ import annotations

import re
from typing import NamedTuple


class Class(NamedTuple):
    """A class of kernels and operators, given by patterns of their names.

    kernels: the pattern for kernels and memory operations of a GPU. operators: the pattern for operators, which is used if
    there is no GPU; None if the class contains no operators.
    """

    kernels: re.Pattern[str]
    operators: re.Pattern[str] | None


CLASSES = {
    # Kineto names a copy by the driver such as `Memcpy DtoD (Device -> Device)`. The only operator that copies is aten::copy_.
    "memory copies": Class(re.compile(r"^Memcpy\b"), re.compile(r"^aten::copy_$")),
    # The kernel of pointwise operators on aligned memory (PyTorch, aten/src/ATen/native/cuda/CUDALoops.cuh).
    "vectorized kernels": Class(re.compile(r"(?<!\w)vectorized_elementwise_kernel(?!\w)"), None),
    # Names of cuBLAS kernels contain gemm (ampere_sgemm_..., sm80_xmma_gemm_..., cutlass_..._gemm_...) or begin with nvjet_.
    "GEMM": Class(re.compile(r"gemm|^nvjet_", re.IGNORECASE), re.compile(r"^aten::(mm|addmm|bmm|baddbmm)$")),
}


def pattern(of: str, source: str) -> re.Pattern[str] | None:
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
