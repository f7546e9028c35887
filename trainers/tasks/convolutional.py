"""The part that all convolutional workloads share. Their operations are counted layer by layer: no short formula gives them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardlab.cell import Cell, Optimizer
from shardlab.registry import Option
from trainers.tasks import image_task, vision_library
from trainers.tasks.image_task import ImageTask
from trainers.workload import Batch, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

OPTIONS = (
    Option("channels_last", True, "on a GPU, images are in channels-last memory format (NHWC), which suits tensor cores"),
    Option("cudnn_benchmark", True, "on a GPU, cuDNN tries its algorithms on the first batch and keeps the fastest"),
)
SMALLEST = 32  # pixels a side: the networks halve an image five times
FLOPS_SOURCE = (
    "per image 6*M - 2*M0: M multiply-adds of all convolutions and linear layers, 2 operations each, once in forward and "
    "twice in backward (Amodei and Hernandez, AI and Compute, 2018, appendix), without the gradient of the image, which is "
    "not needed (M0: multiply-adds of the first layer)"
)


class ConvolutionalTask(ImageTask):
    """architecture: makes the network, given the number of classes and whether it has its own dropout; called when torchvision
    is imported. blocks: finds its repeated blocks."""

    def __init__(
        self,
        cell: Cell,
        data_path: Path,
        *,
        classes: int,
        architecture: Callable[[int, bool], nn.Module],
        blocks: Callable[[nn.Module], list[nn.Module]],
    ) -> None:
        super().__init__(cell, data_path, classes)
        self._architecture, self._blocks = architecture, blocks

    def model(self) -> nn.Module:
        import torch

        vision_library.load()
        from trainers.tasks.batch_norm import mix

        torch.backends.cudnn.benchmark = bool(self._cell.options["cudnn_benchmark"])
        return mix(self._architecture(self.classes, self.dropout))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return self._blocks(model)

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        import torch

        # Where a strategy keeps the weights themselves in bf16, images have to be that too, as transformers' models have it.
        images = batch.inputs.to(next(model.parameters()).dtype)
        if self._cell.options["channels_last"] and images.is_cuda:
            # Only the images: FSDP needs contiguous weights, and a convolution takes the memory format of its input.
            images = images.contiguous(memory_format=torch.channels_last)
        return cast("torch.Tensor", model(images))

    def flops_per_unit(self) -> float:
        """By FLOPS_SOURCE, counted in a forward pass of one image on the meta device, which needs no memory."""
        import torch

        with torch.device("meta"):
            model, image = self.model().eval(), torch.empty(1, 3, self.image_size, self.image_size)
        return flops_per_image(model, image)


def flops_per_image(model: nn.Module, image: torch.Tensor) -> float:
    """Floating-point operations of forward and backward for `image`, (1, 3, size, size), by FLOPS_SOURCE."""
    from torch import nn

    found: list[int] = []

    def count(layer: Any, _: object, output: torch.Tensor) -> None:
        found.append(output.numel() * layer.weight[0].numel())  # each output sums over the weights of its channel

    hooks = [layer.register_forward_hook(count) for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    model(image)
    for hook in hooks:
        hook.remove()
    return 6.0 * sum(found) - 2.0 * found[0]


def of_type(block: type, model: nn.Module) -> list[nn.Module]:
    """A network's modules of one class, in order."""
    return [module for module in model.modules() if isinstance(module, block)]


def variant(
    name: str,
    summary: str,
    *,
    parameters: int,
    flops_per_unit: float,
    image_size: int,
    classes: int,
    architecture: Callable[[int, bool], nn.Module],
    blocks: Callable[[nn.Module], list[nn.Module]],
    optimizer: Optimizer,
    dropout: str | None = None,
    smallest_alone: int = SMALLEST,
) -> Workload:
    """A convolutional workload for the menu. smallest_alone: the smallest image (width in pixels) that may be a micro-batch of
    one image. With a smaller image, a BatchNorm would see one value per channel, which torch refuses."""
    return Workload(
        name=name,
        summary=summary,
        parameters=parameters,
        unit="images",
        flops_per_unit=flops_per_unit,
        flops_source=FLOPS_SOURCE,
        optimizer=optimizer,
        build=partial(ConvolutionalTask, classes=classes, architecture=architecture, blocks=blocks),
        options=(*image_task.options(image_size, dropout, SMALLEST), *OPTIONS),
        refuse=partial(refuse, smallest_alone=smallest_alone),
    )


def refuse(cell: Cell, *, smallest_alone: int) -> str | None:
    size = cast("int", cell.options["image_size"])
    if cell.micro_batch_size == 1 and size < smallest_alone:
        return (
            f"image_size: found {size} with micro_batch_size 1, which leaves BatchNorm a single value per channel. "
            f"Allowed: image_size from {smallest_alone}, or micro_batch_size from 2."
        )
    return None
