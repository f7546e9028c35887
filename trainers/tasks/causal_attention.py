"""Causal attention for models of transformers, without the mask that transformers builds for every pass.

To build its mask, transformers asks the GPU whether sequences are packed, and the host waits for the answer in every forward
pass (`create_causal_mask`). Sequences here are never packed and never padded, and torch's scaled_dot_product_attention needs
no mask to be causal.
"""

from __future__ import annotations

import functools

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "causal_sdpa"  # transformers builds no mask for an unknown name; with "flash" in it, it would require flash-attn


@functools.cache
def register() -> str:
    """Register torch's causal attention with transformers; returns its name. vision_library.load() must have run before."""
    AttentionInterface.register(NAME, sdpa_attention_forward)
    return NAME
