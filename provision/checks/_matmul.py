"""A matrix product on every GPU, of small integers, which float32 adds exactly in any order, so that results must be equal."""

from __future__ import annotations

import json
import sys

import torch

SIDE = 512  # sums of at most 512 x 7 x 7, far below 2**24
TOP = 8


def wrong_elements(device: torch.device) -> int:
    """How many elements of a product on a device differ from the product of whole numbers on the processor."""
    rows = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE)
    left, right = rows % TOP, (rows // 3) % TOP
    product = left.to(device, torch.float32) @ right.to(device, torch.float32)
    return int((product.cpu() != left @ right).sum())


def main() -> None:
    """Prints the number of wrong elements by GPU."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    sys.stdout.write(json.dumps({"wrong": [wrong_elements(gpu) for gpu in gpus]}) + "\n")
