"""The task of an image classifier of torchvision, selected by its name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from shardlab.errors import InputError, UnknownName
from shardlab.matrix.cell import Cell
from trainers.model import blocks, counted_flops
from trainers.model.blocks import BlockFinder
from trainers.tasks import vision_library
from trainers.tasks.convolutional_task import ConvolutionalTask
from trainers.workload_options import IMAGENET_CLASSES

TWIN_CLASSES = 10


def list_classifier_names() -> list[str]:
    """The names of the image classifiers of torchvision."""
    torchvision = vision_library.import_torchvision()
    return list(torchvision.models.list_models(module=torchvision.models))


def build_network(name: str, classes: int, *, twin: bool) -> nn.Module:
    """The network with random weights.

    classes: number of outputs. twin: whether to shorten it to its tiny twin. Raises InputError, without the name of the file,
    if torchvision cannot build it.
    """
    torchvision = vision_library.import_torchvision()
    if name not in list_classifier_names():
        raise UnknownName("image classifier of torchvision", name, list_classifier_names())
    try:
        model = cast("nn.Module", torchvision.models.get_model(name, weights=None, num_classes=classes))
    except (MemoryError, RuntimeError):
        raise
    except Exception as error:
        raise InputError(f"torchvision cannot build it: {type(error).__name__}: {str(error)[:200]}") from error
    if twin:
        _shorten_network(model)
    return model


def _shorten_network(model: nn.Module) -> None:
    """Remove blocks from a network, in place. Of each list of blocks, only the first block is kept, because later blocks do not
    change the shape of the data. If there is only one list, two blocks are kept."""
    names_by_list: dict[str, list[str]] = {}
    for name in blocks.find_block_names(model):
        list_path, _, block_name = name.rpartition(".")
        names_by_list.setdefault(list_path, []).append(block_name)
    kept_blocks = 1 if len(names_by_list) > 1 else 2
    for list_path, block_names in names_by_list.items():
        block_list = model.get_submodule(list_path)
        for block_name in block_names[kept_blocks:]:
            del block_list._modules[block_name]
    for list_path in names_by_list:
        block_list = model.get_submodule(list_path)
        if isinstance(block_list, nn.ModuleList):  # a ModuleList needs consecutive numbers as names
            block_list._modules = {str(number): module for number, module in enumerate(block_list._modules.values())}


class VisionTask(ConvolutionalTask):
    """The task of a network of torchvision. All its operations are counted, because some networks compute with more than
    convolutions and linear layers."""

    def flops_per_unit(self) -> float | None:
        return counted_flops.count_task_flops(self)


def build(cell: Cell, data_path: Path, name: str, *, twin: bool) -> VisionTask:
    """The task of the network with this name. twin: whether it is the tiny twin. Raises InputError."""
    classes, build_model = TWIN_CLASSES if twin else IMAGENET_CLASSES, partial(build_network, name, twin=twin)
    return VisionTask(cell, data_path, classes=classes, build_model=build_model, find_blocks=BlockFinder().find_blocks)
