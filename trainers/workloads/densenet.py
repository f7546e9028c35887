"""Workloads: image classification with torchvision's DenseNet, from random weights."""

from __future__ import annotations

from shardlab.matrix.cell import Optimizer
from trainers.convolutional_workload import convolutional_workload
from trainers.workload_options import IMAGENET_CLASSES

TASK = "trainers.tasks.densenet"
OPTIMIZER = Optimizer(name="sgd", lr=0.1)  # the optimizer of Huang et al., 2017, section 4.2, for a global batch of 256 images


VARIANTS = (
    convolutional_workload(
        "densenet121-tiny",
        "DenseNet of 3 dense blocks with 8 layers that grow by 12, the twin of densenet121",
        parameters=64_486,
        flops_per_unit=11_828_088.0,
        image_size=32,
        classes=10,
        task=TASK,
        tiny=True,
        optimizer=OPTIMIZER,
    ),
    convolutional_workload(
        "densenet121",
        "DenseNet-121 (Huang et al., 2017), 4 dense blocks",
        parameters=7_978_856,
        flops_per_unit=16_768_942_080.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        task=TASK,
        optimizer=OPTIMIZER,
        smallest_single=64,
    ),
)
