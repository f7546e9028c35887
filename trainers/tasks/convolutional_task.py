"""The task of a convolutional network that classifies images. Its floating-point operations are counted layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import StochasticDepth

from shardlab.matrix.cell import Cell
from trainers.task import Batch
from trainers.tasks.image_task import ImageTask
from trainers.workloads.convolutional import ConvolutionOptions

if TYPE_CHECKING:
    from collections.abc import Callable


class ConvolutionalTask(ImageTask):
    """The task of a convolutional network.

    build_model: function of the number of classes that returns the network, with its own dropout. find_blocks: function that
    returns the repeated blocks of a network.
    """

    def __init__(
        self,
        cell: Cell,
        data_path: Path,
        *,
        classes: int,
        build_model: Callable[[int], nn.Module],
        find_blocks: Callable[[nn.Module], list[nn.Module]],
    ) -> None:
        super().__init__(cell, data_path, classes)
        self._convolution_options = ConvolutionOptions(cell.options)
        self._build_model, self._find_blocks = build_model, find_blocks

    def model(self) -> nn.Module:
        torch.backends.cudnn.benchmark = self._convolution_options.cudnn_benchmark
        model = self._build_model(self.classes)
        for module in find_dropout_modules(model) if not self.dropout else ():
            module.p = 0.0  # type: ignore[assignment]
        return mix_batch_norms(model)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return self._find_blocks(model)

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        # Images need the dtype of the weights, because some strategies keep the weights in bf16. (The models of transformers
        # cast their inputs themselves.)
        images = batch.inputs.to(next(model.parameters()).dtype)
        if self._convolution_options.channels_last and images.is_cuda:
            # Only the images get this memory format: FSDP needs contiguous weights, and a convolution uses the memory format of
            # its input.
            images = images.contiguous(memory_format=torch.channels_last)
        return cast("torch.Tensor", model(images))

    def flops_per_unit(self) -> float | None:
        """As `Task.flops_per_unit`, by the rule in FLOPS_SOURCE. The operations are counted in a forward pass of one image on
        the meta device, which needs no memory."""
        with torch.device("meta"):
            model, image = self.model().eval(), torch.empty(1, 3, self.image_size, self.image_size)
        return count_flops_per_image(model, image)


def count_flops_per_image(model: nn.Module, image: torch.Tensor) -> float:
    """Floating-point operations of forward and backward for one image, (1, 3, size, size), by the rule in FLOPS_SOURCE."""
    layer_flops: list[int] = []

    def record_layer_flops(layer: Any, _: object, output: torch.Tensor) -> None:
        # an element of the output is a sum over its channel's weights
        layer_flops.append(output.numel() * layer.weight[0].numel())

    hooks = [
        layer.register_forward_hook(record_layer_flops)
        for layer in model.modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    ]
    model(image)
    for hook in hooks:
        hook.remove()
    return 6.0 * sum(layer_flops) - 2.0 * layer_flops[0]


def find_dropout_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of dropout and stochastic depth whose rate is above 0."""
    return [module for module in model.modules() if isinstance(module, (_DropoutNd, StochasticDepth)) and module.p]


class MixedBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d that also works with weights in bf16 and statistics in fp32, which torch's BatchNorm2d does not support.

    If the weights have another dtype than the statistics, they are cast to the dtype of the statistics.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        if self.weight.dtype == mean.dtype:
            return super().forward(input)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        weight, bias = self.weight.to(mean.dtype), self.bias.to(mean.dtype)
        return batch_norm(input, mean, variance, weight, bias, self.training, self.momentum or 0.0, self.eps)


def mix_batch_norms(model: nn.Module) -> nn.Module:
    """Turn every BatchNorm2d of a network into MixedBatchNorm2d, in place. Parameters and their names stay the same."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = MixedBatchNorm2d  # done afterwards: some networks of torchvision always use BatchNorm2d
    return model
