"""The precisions of a cell, without torch: the dtypes of weights, computation and gradients. `trainers.dtypes` has torch's.

bf16, fp16: forward and backward compute with 16-bit copies of the weights; the weights, the optimizer and the reduction of
gradients are fp32. bf16-autocast, fp16-autocast: torch's autocast chooses the dtype of each operator instead, so that some
compute in fp32. bf16-pure: everything is bf16.
"""

from __future__ import annotations

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
