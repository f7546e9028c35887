"""Causal attention for models of transformers, without the mask that transformers builds for every pass.

To build its mask (`create_causal_mask`), transformers reads from the GPU whether sequences are packed, so the host waits for
the GPU in every forward pass. The mask is not needed: sequences are never packed or padded here, and torch's
scaled_dot_product_attention can be causal without a mask.
"""

from __future__ import annotations

import functools

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# transformers builds no mask for a name that it does not know. A name with "flash" in it would require flash-attn.
ATTENTION_NAME = "causal_sdpa"


@functools.cache
def register_causal_attention() -> str:
    """Register torch's attention with transformers and return its name. Call `vision_library.load()` before."""
    AttentionInterface.register(ATTENTION_NAME, sdpa_attention_forward)
    return ATTENTION_NAME
