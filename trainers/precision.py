"""What each precision of a cell turns on in torch, and what of it a device can honour."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIXED = ("fp32", "tf32", "bf16", "fp16")  # with fp32 weights and optimizer; autocast or FSDP casts what it computes with
ALL = (*MIXED, "bf16-pure")
COMPUTED_IN = {"bf16": "bfloat16", "fp16": "float16", "bf16-pure": "bfloat16"}  # torch's name; fp32 for others


def weight_bytes(precision: str) -> int:
    """Bytes of an element of weights, gradients, their reduction and optimizer state."""
    return 2 if precision == "bf16-pure" else 4


def computed_bytes(precision: str) -> int:
    """Bytes of an element that forward and backward compute with."""
    return 2 if precision in COMPUTED_IN else 4


def weight_dtype(precision: str) -> torch.dtype:
    """The dtype of weights, gradients, their reduction and optimizer state."""
    import torch

    return torch.bfloat16 if precision == "bf16-pure" else torch.float32


def low_dtype(precision: str) -> torch.dtype | None:
    """The dtype that fp32 weights are cast to for forward and backward, or None where they are not cast."""
    import torch

    return getattr(torch, COMPUTED_IN[precision]) if precision in MIXED and precision in COMPUTED_IN else None


def as_weights(inputs: torch.Tensor, precision: str) -> torch.Tensor:
    """Inputs of a model in the dtype of its weights, unless they are indices: layers take no mixture."""
    return inputs.to(weight_dtype(precision)) if inputs.is_floating_point() else inputs


def set_tf32(precision: str) -> None:
    """Allow TF32 in matrix products and convolutions on a GPU for `tf32`, and forbid it for all others.

    cuDNN allows it by default, which would make an fp32 run of an image model something else than its name.
    """
    import torch

    allowed = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = allowed
    torch.backends.cudnn.conv.fp32_precision = allowed  # type: ignore[attr-defined]


def tf32_in_effect(device: torch.device) -> bool | str:
    """Whether fp32 matrix products may run in TF32, as torch holds it now."""
    import torch

    if device.type != "cuda":
        return "no effect on a CPU"
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass over fp32 weights: `low_dtype` where there is one, else nothing."""
    import torch

    dtype = low_dtype(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")
