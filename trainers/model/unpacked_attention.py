"""Torch's attention for models of transformers whose sequences are neither packed nor padded.

In each pass, transformers reads from the GPU whether sequences are packed or padded, and the host waits for the GPU. Here,
sequences are never packed or padded, so this is not needed. If a model needs a mask for another reason, such as a sliding
window, transformers makes the mask as usual.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION_NAME = "unpacked_sdpa"


@functools.cache
def register_unpacked_attention() -> str:
    """Register the attention with transformers and return its name. Call `vision_library.load()` before."""
    AttentionInterface.register(ATTENTION_NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _make_mask)
    return ATTENTION_NAME


def make_unpadded_mask(tokens: torch.Tensor) -> torch.Tensor:
    """The padding mask (items, positions) of sequences without padding. If this mask is given, transformers does not check
    whether sequences are packed."""
    return torch.ones_like(tokens)


def _make_mask(*sizes: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """Make a mask as transformers does, but without reading the padding mask from the GPU. attention_mask: the mask from
    `make_unpadded_mask`; it is ignored, because its content is known."""
    mask: torch.Tensor | None = sdpa_mask(*sizes, attention_mask=None, **options)
    return mask
