"""The torch dtypes for each precision of a cell: of weights, of computation and of hidden states."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from trainers.model.precision import AUTOCAST, CAST, COMPUTED_IN


def weight_dtype(precision: str) -> torch.dtype:
    """The dtype of weights, of gradients and their reduction, and of optimizer state."""
    return torch.bfloat16 if precision == "bf16-pure" else torch.float32


def cast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of the copies of fp32 weights that forward and backward use; None if they use the weights themselves."""
    return getattr(torch, COMPUTED_IN[precision]) if precision in CAST else None


def stream_dtype(precision: str) -> torch.dtype:
    """The dtype of a model's inputs, unless they are indices, and of the hidden states between blocks."""
    return cast_dtype(precision) or weight_dtype(precision)


def cast_inputs(inputs: torch.Tensor, precision: str) -> torch.Tensor:
    """Cast the inputs of a model to the dtype of its first layer, because a layer needs inputs and weights of one dtype. Inputs
    that are indices (tokens) stay as they are."""
    return inputs.to(stream_dtype(precision)) if inputs.is_floating_point() else inputs


def set_tf32(precision: str, device: torch.device) -> None:
    """On a GPU, allow TF32 in matrix products and convolutions for the precision `tf32`, and forbid it for all others.

    cuDNN allows TF32 by default, so an fp32 run of an image model would use TF32. This function sets torch's older flags: if
    only the newer flags (`fp32_precision`) are set, reading the older flags raises an error, and parts of torch still read
    the older flags.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def read_tf32_setting(device: torch.device) -> bool | str:
    """Whether fp32 matrix products may run in TF32, read from torch's current settings."""
    if device.type != "cuda":
        return "no effect on a CPU"
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def make_autocast_context(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass: torch's autocast for the precisions that use autocast, else an empty context."""
    if precision not in AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, COMPUTED_IN[precision]))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the prefix `torch.`: `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
