"""Workloads: image classification with torchvision's ConvNeXt, from random weights."""

from __future__ import annotations

from shardlab.matrix.cell import Optimizer
from trainers.convolutional_workload import convolutional_workload
from trainers.workload_options import IMAGENET_CLASSES

TASK = "trainers.tasks.convnext"
OPTIMIZER = Optimizer(name="adamw", lr=1e-3)
RATES = "blocks are skipped with a probability that rises to 0.5"


VARIANTS = (
    convolutional_workload(
        "convnext-large-tiny",
        "ConvNeXt of 5 blocks with 16 to 96 channels, the twin of convnext-large",
        parameters=202_490,
        flops_per_unit=4_961_472.0,
        image_size=32,
        classes=10,
        task=TASK,
        tiny=True,
        optimizer=OPTIMIZER,
        dropout=RATES,
    ),
    convolutional_workload(
        "convnext-large",
        "ConvNeXt-L (Liu et al., 2022), 36 blocks",
        parameters=197_767_336,
        flops_per_unit=206_110_798_848.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        task=TASK,
        optimizer=OPTIMIZER,
        dropout=RATES,
    ),
)
