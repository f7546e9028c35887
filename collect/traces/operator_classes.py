"""Which kernels and operators a name means: one of them, or a class of them as studies speak of it."""

from __future__ import annotations

import re
from typing import NamedTuple


class Class(NamedTuple):
    """Patterns that are searched for: in the names of a GPU's kernels and copies, and of operators where there is no GPU."""

    kernels: re.Pattern[str]
    operators: re.Pattern[str] | None


CLASSES = {
    # Kineto calls what the driver copies `Memcpy DtoD (Device -> Device)`; operators copy by aten::copy_ alone.
    "memory copies": Class(re.compile(r"^Memcpy\b"), re.compile(r"^aten::copy_$")),
    # The kernel of pointwise operators on memory that is aligned (PyTorch, aten/src/ATen/native/cuda/CUDALoops.cuh).
    "vectorized kernels": Class(re.compile(r"(?<!\w)vectorized_elementwise_kernel(?!\w)"), None),
    # cuBLAS has gemm in a kernel's name (ampere_sgemm_..., sm80_xmma_gemm_..., cutlass_..._gemm_...), but for its nvjet_...
    "GEMM": Class(re.compile(r"gemm|^nvjet_", re.IGNORECASE), re.compile(r"^aten::(mm|addmm|bmm|baddbmm)$")),
}


def pattern(of: str, source: str) -> re.Pattern[str] | None:
    """What is to be searched for in the names of a trace of this source; None for a class that it has not.

    A name that is no class's is looked for as whole words: CatArrayBatchedCopy is not CatArrayBatchedCopy_contig. With a `*`
    at its end words may go on, as where a table cuts a name off.
    """
    if of in CLASSES:
        return CLASSES[of].kernels if source == "gpu" else CLASSES[of].operators
    end = "" if of.endswith("*") else r"(?!\w)"
    return re.compile(rf"(?<!\w){re.escape(of.removesuffix('*'))}{end}")
