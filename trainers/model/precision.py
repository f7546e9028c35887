"""The precisions of a cell and the sizes of their elements, without torch. `trainers.dtypes` has the dtypes of torch.

- fp32, tf32: everything is fp32; with tf32, a GPU may round the inputs of matrix products and convolutions to TF32.
- bf16, fp16: forward and backward compute with 16-bit copies of the weights; the weights, the optimizer and the reduction of
  gradients are fp32.
- bf16-autocast, fp16-autocast: torch's autocast chooses the dtype of each operator; some operators compute in fp32.
- bf16-pure: everything is bf16.
"""

from __future__ import annotations

CAST = ("bf16", "fp16")
AUTOCAST = ("bf16-autocast", "fp16-autocast")
MIXED = ("fp32", "tf32", *CAST)  # fp32 weights and optimizer state; all operators compute in the same dtype
SHARDED = (*MIXED, "bf16-pure")  # the precisions of strategies that cast weights when they gather them
ALL = (*MIXED, *AUTOCAST, "bf16-pure")
NO_AUTOCAST = "the strategy itself casts the weights to 16 bits"
REASONS = dict.fromkeys(AUTOCAST, NO_AUTOCAST)  # why strategies with the precisions MIXED or SHARDED refuse autocast
COMPUTED_IN = {  # precision -> torch's name of the 16-bit dtype in which it computes
    "bf16": "bfloat16", "bf16-autocast": "bfloat16", "bf16-pure": "bfloat16", "fp16": "float16", "fp16-autocast": "float16",
}  # fmt: skip


def weight_bytes(precision: str) -> int:
    """Bytes per element of weights, of gradients and their reduction, and of optimizer state."""
    return 2 if precision == "bf16-pure" else 4


def computed_bytes(precision: str) -> int:
    """Bytes per element of the inputs of matrix products."""
    return 2 if precision in COMPUTED_IN else 4


def stream_bytes(precision: str) -> int:
    """Bytes per element of the hidden states between blocks. With autocast they have the dtype of the weights."""
    return weight_bytes(precision) if precision in AUTOCAST else computed_bytes(precision)


def scales_loss(precision: str) -> bool:
    """Whether the loss is scaled up in this precision, because small gradients could vanish (fp16)."""
    return COMPUTED_IN.get(precision) == "float16"
