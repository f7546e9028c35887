"""Sequence parallelism: between split layers each rank keeps a slice of the positions, not all of them.

Between split layers, a rank needs only its slice of the sums of tensor parallelism. So a reduce-scatter and an all-gather
replace each all-reduce: the same bytes, and 1/n of the memory (Korthikanti et al., Reducing activation recomputation, 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

POSITIONS = 1  # the dimension of a hidden state (items, positions, width)


def cut_between(first: nn.Module, last: nn.Module, mesh: DeviceMesh) -> None:
    """Slice the hidden state that enters the first block, and gather the one that leaves the last. A hidden state is a
    block's first argument and all of its output."""

    def enter(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = DTensor.from_local(arguments[0], mesh, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[Shard(POSITIONS)]).to_local(), *arguments[1:])

    def leave(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        part = DTensor.from_local(output, mesh, [Shard(POSITIONS)], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()

    first.register_forward_pre_hook(enter)
    last.register_forward_hook(leave)
