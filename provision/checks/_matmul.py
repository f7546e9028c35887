"""Computes a matrix product of small integers on every GPU. In float32 such sums are exact in any order of the additions."""

from __future__ import annotations

import json
import sys

import torch

MATRIX_SIDE = 512  # an element of the product is at most 512 x 7 x 7; float32 represents integers exactly up to 2**24
FACTOR_LIMIT = 8  # the elements of the two factors are integers from 0 to 7


def count_wrong_elements(device: torch.device) -> int:
    """The number of elements of the product on `device` that differ from the exact integer product on the CPU."""
    element_numbers = torch.arange(MATRIX_SIDE * MATRIX_SIDE).reshape(MATRIX_SIDE, MATRIX_SIDE)
    left_factor, right_factor = element_numbers % FACTOR_LIMIT, (element_numbers // 3) % FACTOR_LIMIT
    product = left_factor.to(device, torch.float32) @ right_factor.to(device, torch.float32)
    return int((product.cpu() != left_factor @ right_factor).sum())


def main() -> None:
    """Print, as JSON, the number of wrong elements on each GPU."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    sys.stdout.write(json.dumps({"wrong": [count_wrong_elements(gpu) for gpu in gpus]}) + "\n")
