"""Sorts kernels and operators into categories of work, by the operator that launched a kernel and by the names of kernels."""

from __future__ import annotations

import re
from typing import Literal, get_args

from collect.traces.attention import find_kernel_backend, find_operator_backend

WorkCategory = Literal[
    "matrix products",
    "convolution",
    "normalisation",
    "attention",
    "element-wise",
    "reduction",
    "copies",
    "communication",
    "other",
]
CATEGORIES: tuple[WorkCategory, ...] = get_args(WorkCategory)
# Operators whose kernels all do the same work, whatever their names: a convolution may call a kernel of products.
_SINGLE_CATEGORY_PATTERNS: tuple[tuple[re.Pattern[str], WorkCategory], ...] = (
    (re.compile(r"conv(?!er)", re.IGNORECASE), "convolution"),
    (re.compile(r"::(?:_int_|_scaled_|_grouped_|_scaled_grouped_)?(?:mm|addmm_?|bmm|baddbmm_?|addbmm|mv|addmv_?|dot|linear|matmul|"
                r"_addmm_activation)\Z"),
     "matrix products"),
    (re.compile(r"(?:layer|batch|group|instance|rms)_?norm", re.IGNORECASE), "normalisation"),
    (re.compile(r"::(?:copy_|_to_copy|cat|_cat|clone|contiguous|stack|_pin_memory)\Z"), "copies"),
)  # fmt: skip
_KERNEL_PATTERNS: tuple[tuple[re.Pattern[str], WorkCategory], ...] = (
    (re.compile(r"triton_poi_"), "element-wise"),
    (re.compile(r"triton_(?:red|per)_\w*norm"), "normalisation"),
    (re.compile(r"triton_(?:red|per)_"), "reduction"),
    (re.compile(r"im2col|winograd|wgrad|dgrad|implicit_gemm|convolve|conv(?:olution|\dd|_depthwise)|miopen\w*conv|fprop", re.I),
     "convolution"),
    (re.compile(r"gemm|gemv|\bbmm_|nvjet|cutlass|Cijk_|matmul|splitk|triton_(?:mm|tem_)", re.IGNORECASE), "matrix products"),
    (re.compile(r"(?:layer|batch|group|instance|rms)_?norm|RowwiseMoments|GammaBeta|\bbn_[fb]w", re.IGNORECASE),
     "normalisation"),
    (re.compile(r"CatArrayBatchedCopy|transpose|nchwToNhwc|nhwcToNchw|direct_copy|\bcopy_", re.IGNORECASE), "copies"),
    (re.compile(r"reduce|softmax|\bscan|cumsum|argm(?:ax|in)|topk|sort|nll_loss", re.IGNORECASE),
     "reduction"),
    (re.compile(r"elementwise|multi_tensor_apply|dropout|distribution_|fill|gelu|silu|relu|act_and_mul|rotary",
                re.IGNORECASE),
     "element-wise"),
)  # fmt: skip
_LONGEST_SEARCHED = 500  # the most characters of a kernel's name that are searched: names of templates may have thousands
_ATTENTION_KERNEL = re.compile(r"attention|fmha", re.IGNORECASE)  # kernels of attention whose implementation is not known
_OTHER_PATTERNS: tuple[tuple[re.Pattern[str], WorkCategory], ...] = (
    (re.compile(r"c10d::|c10d_functional::|\Agloo:|\Anccl:"), "communication"),
    (re.compile(r"::(?:\w*softmax\w*|sum|mean|prod|a?max|a?min|arg(?:max|min)|std|var|norm|linalg_vector_norm|cum\w+|sort|topk|"
                r"nll_loss\w*|\w*cross_entropy\w*|all|any|logsumexp)\Z"),
     "reduction"),
    (re.compile(r"::_?(?:foreach_\w+|fused_\w+|add|sub|mul|div|neg|exp|log|sqrt|rsqrt|pow|sin|cos|erf|abs|clamp\w*|where|"
                r"masked_fill|fill|zero|lerp|addcmul|addcdiv|gelu\w*|relu\w*|silu\w*|sigmoid\w*|tanh\w*|threshold\w*|\w*dropout\w*|"
                r"bernoulli|normal|uniform|random|eq|ne|lt|le|gt|ge|bitwise_\w+|logical_\w+|rsub|reciprocal|square|arange)_?\Z"),
     "element-wise"),
)  # fmt: skip


def classify_operator(operator: str) -> WorkCategory:
    """The category of the work of an operator, by its name alone, as for the operators of a CPU."""
    if find_operator_backend(operator):
        return "attention"
    return _find_category(operator, _SINGLE_CATEGORY_PATTERNS) or _find_category(operator, _OTHER_PATTERNS) or "other"


def classify_kernel(kernel: str, operator: str) -> WorkCategory:
    """The category of a kernel that neither belongs to attention nor communicates.

    operator: the operator that launched the kernel; "" if it is not known.
    """
    # Inductor names a kernel after all operators that it replaces, and the operator after the kernel
    category = None if operator.startswith("triton_") else _find_category(operator, _SINGLE_CATEGORY_PATTERNS)
    if category is None and (find_kernel_backend(kernel) or _ATTENTION_KERNEL.search(kernel)):
        return "attention"
    return category or _find_category(kernel[:_LONGEST_SEARCHED], _KERNEL_PATTERNS) or classify_operator(operator)


def _find_category(name: str, category_patterns: tuple[tuple[re.Pattern[str], WorkCategory], ...]) -> WorkCategory | None:
    return next((category for pattern, category in category_patterns if pattern.search(name)), None)
