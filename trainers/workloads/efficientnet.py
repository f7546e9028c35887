"""Workloads: image classification with torchvision's EfficientNetV2, from random weights."""

from __future__ import annotations

from shardlab.matrix.cell import Optimizer
from trainers.convolutional_workload import convolutional_workload
from trainers.workload_options import IMAGENET_CLASSES

TASK = "trainers.tasks.efficientnet"
OPTIMIZER = Optimizer(name="adamw", lr=1e-3)
RATES = "0.4 before the head, and blocks are skipped with a probability that rises to 0.2"


VARIANTS = (
    convolutional_workload(
        "efficientnet-v2-l-tiny",
        "EfficientNetV2 of 6 blocks with 16 to 48 channels, the twin of efficientnet-v2-l",
        parameters=101_388,
        flops_per_unit=12_082_176.0,
        image_size=32,
        classes=10,
        task=TASK,
        tiny=True,
        optimizer=OPTIMIZER,
        dropout=RATES,
    ),
    convolutional_workload(
        "efficientnet-v2-l",
        "EfficientNetV2-L (Tan and Le, 2021), 79 blocks",
        parameters=118_515_272,
        flops_per_unit=73_365_455_232.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        task=TASK,
        optimizer=OPTIMIZER,
        smallest_single=33,
        dropout=RATES,
    ),
)
