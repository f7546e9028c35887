"""Builds a model for ZeRO-3 block by block, so that a rank never has more in memory than its shards and one whole block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import nn
from torch.nn.functional import pad

if TYPE_CHECKING:
    from trainers.deferred_init import Deferred
    from trainers.ranks import Ranks


def shard(
    model: nn.Module,
    deferred: Deferred,
    blocks: Iterable[nn.Module],
    ranks: Ranks,
    config: dict[str, Any],
    computed: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """Fill and shard the blocks of a model on the meta device, one by one, and then the rest of the model. A collective.

    config: DeepSpeed's configuration. computed: the dtype to which the weights are cast; None: they are not cast. Returns this
    rank's parts of the fp32 weights by name, in host memory; an empty dict if `computed` is None.
    """
    parts: dict[str, torch.Tensor] = {}
    init: Any = None
    for module in (*blocks, model):
        deferred.fill(module)
        if computed is not None:
            for name, parameter in model.named_parameters():
                if not parameter.is_meta and name not in parts:
                    parts[name] = part_of(parameter.detach(), ranks.rank, ranks.world_size).cpu()
            module.to(computed)
        if init is None:  # one object for all blocks: each object allocates buffers if parameters are offloaded to NVMe
            init = deepspeed.zero.Init(module=module, config_dict_or_path=config)
        else:
            init._convert_to_zero_parameters(module.parameters())
    return parts


def part_of(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The elements of a whole parameter that belong to a rank in ZeRO-3, 1-dim. DeepSpeed pads each parameter, so that its size
    is a multiple of the number of ranks."""
    flat = whole.flatten()
    return pad(flat, (0, -flat.numel() % ranks)).chunk(ranks)[rank]
