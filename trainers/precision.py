"""What each precision of a cell turns on in torch, and what of it a device can honour."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIXED = ("fp32", "tf32", "bf16")  # precisions with fp32 weights and optimizer that autocast or FSDP can give


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
    """The context of a forward pass over fp32 weights: bf16 for `bf16`, nothing for fp32 and tf32."""
    import torch

    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")
