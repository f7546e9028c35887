"""Workloads: image classification with torchvision's ResNet, from random weights."""

from __future__ import annotations

from shardlab.matrix.cell import Optimizer
from trainers.convolutional_workload import convolutional_workload
from trainers.workload_options import IMAGENET_CLASSES

TASK = "trainers.tasks.resnet"
OPTIMIZER = Optimizer(name="sgd", lr=0.1)  # the optimizer of He et al., 2016, section 3.4, for a global batch of 256 images


VARIANTS = (
    convolutional_workload(
        "resnet50-tiny",
        "ResNet of 4 narrow bottlenecks, the twin of resnet50",
        parameters=305_386,
        flops_per_unit=18_683_904.0,
        image_size=32,
        classes=10,
        task=TASK,
        layers=(1, 1, 1, 1),
        optimizer=OPTIMIZER,
    ),
    convolutional_workload(
        "resnet101-tiny",
        "ResNet of 5 narrow bottlenecks, the twin of resnet101",
        parameters=331_626,
        flops_per_unit=19_298_304.0,
        image_size=32,
        classes=10,
        task=TASK,
        layers=(1, 1, 2, 1),
        optimizer=OPTIMIZER,
    ),
    convolutional_workload(
        "resnet50",
        "ResNet-50 (He et al., 2016), 16 bottlenecks",
        parameters=25_557_032,
        flops_per_unit=24_299_077_632.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        task=TASK,
        depth=50,
        optimizer=OPTIMIZER,
        smallest_single=33,
    ),
    convolutional_workload(
        "resnet101",
        "ResNet-101 (He et al., 2016), 33 bottlenecks",
        parameters=44_549_160,
        flops_per_unit=46_572_404_736.0,
        image_size=224,
        classes=IMAGENET_CLASSES,
        task=TASK,
        depth=101,
        optimizer=OPTIMIZER,
        smallest_single=33,
    ),
)
