"""torch's attention for models of transformers whose sequences are neither packed nor padded.

For each pass, transformers asks the GPU whether sequences are packed or padded, and the host waits for the answer. Here
neither is ever so. The mask that a model needs otherwise, such as that of a sliding window, is made as transformers makes it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "unpacked_sdpa"


@functools.cache
def register() -> str:
    """Register the attention with transformers; returns its name. vision_library.load() must have run before."""
    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, _mask_without_padding)
    return NAME


def nothing_padded(tokens: torch.Tensor) -> torch.Tensor:
    """The mask (items, positions) of sequences without padding; if it is given, transformers does not look for packing."""
    return torch.ones_like(tokens)


def _mask_without_padding(*sizes: Any, attention_mask: torch.Tensor | None = None, **named: Any) -> torch.Tensor | None:
    """attention_mask: `nothing_padded`, about which nobody has to ask."""
    found: torch.Tensor | None = sdpa_mask(*sizes, attention_mask=None, **named)
    return found
