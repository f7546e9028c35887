"""Workloads: image classification with torchvision's VGG, from random weights. Most weights of a VGG are in 3 linear layers."""

from __future__ import annotations

from shardlab.matrix.cell import Optimizer
from trainers.convolutional_workload import convolutional_workload
from trainers.workload_options import IMAGENET_CLASSES

TASK = "trainers.tasks.vgg"
OPTIMIZER = Optimizer(name="sgd", lr=0.01)  # as in Simonyan and Zisserman, 2015, section 3.1, for a global batch of 256 images
TWINS_OPTIMIZER = Optimizer(name="adamw", lr=2e-3)  # with OPTIMIZER, the tiny twin learns nothing in a short run


VARIANTS = (
    convolutional_workload(
        "vgg16-tiny",
        "VGG of 13 convolutions with 4 to 32 channels, the twin of vgg16",
        parameters=163_054,
        flops_per_unit=8_371_968.0,
        image_size=32,
        classes=10,
        task=TASK,
        tiny=True,
        optimizer=TWINS_OPTIMIZER,
        dropout="0.5 between the linear layers",
    ),
    convolutional_workload(
        "vgg16",
        "VGG-16 (Simonyan and Zisserman, 2015, configuration D)",
        parameters=138_357_544,
        flops_per_unit=92_648_177_664.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        task=TASK,
        optimizer=OPTIMIZER,
        dropout="0.5 between the linear layers",
    ),
)
