"""The precisions of a cell: the dtypes of weights, computation and gradients that each precision sets in torch.

bf16, fp16: forward and backward compute with 16-bit copies of the weights; the weights, the optimizer and the reduction of
gradients are fp32. bf16-autocast, fp16-autocast: torch's autocast chooses the dtype of each operator instead, so that some
compute in fp32. bf16-pure: everything is bf16.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CAST = ("bf16", "fp16")
AUTOCAST = ("bf16-autocast", "fp16-autocast")
MIXED = ("fp32", "tf32", *CAST)  # with fp32 weights and optimizer, and one dtype in all operators
SHARDED = (*MIXED, "bf16-pure")  # for strategies that cast weights when they gather them
ALL = (*MIXED, *AUTOCAST, "bf16-pure")
NO_AUTOCAST = "the strategy itself casts the weights to 16 bits"
REASONS = dict.fromkeys(AUTOCAST, NO_AUTOCAST)  # why strategies with the precisions MIXED or SHARDED refuse autocast
COMPUTED_IN = {  # torch's name of the 16-bit dtype
    "bf16": "bfloat16", "bf16-autocast": "bfloat16", "bf16-pure": "bfloat16", "fp16": "float16", "fp16-autocast": "float16",
}  # fmt: skip


def weight_bytes(precision: str) -> int:
    """Bytes of an element of weights, gradients, their reduction and optimizer state."""
    return 2 if precision == "bf16-pure" else 4


def computed_bytes(precision: str) -> int:
    """Bytes of an element of the inputs of matrix products."""
    return 2 if precision in COMPUTED_IN else 4


def stream_bytes(precision: str) -> int:
    """Bytes of an element of the hidden states between blocks: autocast leaves them in the dtype of the weights."""
    return weight_bytes(precision) if precision in AUTOCAST else computed_bytes(precision)


def scales_loss(precision: str) -> bool:
    """Whether gradients could vanish in the precision, so that the loss is scaled up."""
    return COMPUTED_IN.get(precision) == "float16"


def weight_dtype(precision: str) -> torch.dtype:
    """The dtype of weights, gradients, their reduction and optimizer state."""
    import torch

    return torch.bfloat16 if precision == "bf16-pure" else torch.float32


def cast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of the copies of fp32 weights that forward and backward use; None if they use the weights themselves."""
    import torch

    return getattr(torch, COMPUTED_IN[precision]) if precision in CAST else None


def stream_dtype(precision: str) -> torch.dtype:
    """The dtype of a model's inputs, unless they are indices, and of the hidden states between blocks."""
    return cast_dtype(precision) or weight_dtype(precision)


def as_inputs(inputs: torch.Tensor, precision: str) -> torch.Tensor:
    """Inputs of a model in the dtype that its first layer computes with, unless they are indices: layers take no mixture."""
    return inputs.to(stream_dtype(precision)) if inputs.is_floating_point() else inputs


def set_tf32(precision: str, device: torch.device) -> None:
    """Allow TF32 in matrix products and convolutions on a GPU for `tf32`, and forbid it for all others.

    cuDNN allows TF32 by default; an fp32 run of an image model would then use TF32. This sets torch's older flags: after only
    the newer flags (`fp32_precision`) are set, reading the older flags raises an error, and parts of torch read them.
    """
    import torch

    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def tf32_in_effect(device: torch.device) -> bool | str:
    """Whether fp32 matrix products may run in TF32, as torch holds it now."""
    import torch

    if device.type != "cuda":
        return "no effect on a CPU"
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: torch's autocast for the precisions that have it, else nothing."""
    import torch

    if precision not in AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, COMPUTED_IN[precision]))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")
