"""Gathers parameters or gradients that ZeRO sharded, whole on every rank, with many parameters in one collective.

DeepSpeed's own `safe_get_full_grad` and `safe_get_full_fp32_param` need one collective per parameter: over gloo, a proof took
more time for them than for its steps. The bytes sent are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad

BUCKET = 2**24  # elements: 64 MiB of fp32, twice on a rank, so that a large model is not gathered all at once


def whole(parameters: Iterable[Any], *, gradients: bool) -> Iterator[torch.Tensor]:
    """The fp32 weight of each parameter of ZeRO 1 to 3, or its gradient between a backward pass and the update."""
    bucket: list[Any] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(map(_elements, bucket)) >= BUCKET:
            yield from _of(bucket, gradients)
            bucket = []
    if bucket:
        yield from _of(bucket, gradients)


def _elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _of(bucket: list[Any], gradients: bool) -> list[torch.Tensor]:
    return _gathered(bucket, gradients) if hasattr(bucket[0], "ds_id") else _summed(bucket, gradients)


def _gathered(bucket: list[Any], gradients: bool) -> list[torch.Tensor]:
    """For stage 3, which shards each parameter into equal parts; the last part is padded."""
    read = safe_get_local_grad if gradients else safe_get_local_fp32_param
    shares = [read(parameter).detach().float().flatten() for parameter in bucket]
    mine = torch.cat(shares)
    everyone = mine.new_empty((dist.get_world_size(), len(mine)))
    dist.all_gather(list(everyone), mine)
    columns = torch.split(everyone, [len(share) for share in shares], dim=1)
    return [part.flatten()[: p.ds_numel].view(p.ds_shape) for p, part in zip(bucket, columns, strict=True)]


def _summed(bucket: list[Any], gradients: bool) -> list[torch.Tensor]:
    """For stages 1 and 2, which shard all parameters as one vector: each rank fills its part of zeros, then an all-reduce."""
    together = torch.zeros(sum(map(_elements, bucket)), dtype=torch.float32, device=bucket[0].device)
    parts = torch.split(together, [_elements(parameter) for parameter in bucket])
    for parameter, part in zip(bucket, parts, strict=True):
        cut = parameter._hp_mapping
        if cut is None:
            continue  # none of it lies here
        address = cut.lp_fragment_address
        mine = cut.get_lp_grad_fragment(parameter._index_in_param_group).flatten() if gradients else cut.get_hp_fragment()
        if gradients and len(mine) == parameter.numel():
            mine = mine.narrow(0, address.start, address.numel)  # DeepSpeed's bf16 adds the whole gradient up on every rank
        part.narrow(0, address.start, address.numel).copy_(mine.detach())
    dist.all_reduce(together)
    return [part.view_as(parameter) for parameter, part in zip(bucket, parts, strict=True)]
