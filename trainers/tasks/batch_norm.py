"""BatchNorm with weights in bf16 and statistics in fp32, which torch's own BatchNorm does not support."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import batch_norm


class MixedBatchNorm2d(nn.BatchNorm2d):
    """torch's BatchNorm2d. If its weights have another dtype than its statistics, it casts them to that of the statistics."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        if self.weight.dtype == mean.dtype:
            return super().forward(input)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        weight, bias = self.weight.to(mean.dtype), self.bias.to(mean.dtype)
        return batch_norm(input, mean, variance, weight, bias, self.training, self.momentum or 0.0, self.eps)


def mix(model: nn.Module) -> nn.Module:
    """Turn every BatchNorm2d of a network into MixedBatchNorm2d, in place. Parameters and their names stay the same."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = MixedBatchNorm2d  # not every architecture can be told which class to build
    return model
