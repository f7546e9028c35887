"""Compiles a function with torch.compile on the first GPU. torch.compile uses Triton, which needs a C compiler and Python's
headers."""

from __future__ import annotations

import json
import sys

import torch


def measure_largest_difference(device: torch.device) -> float:
    """The largest difference between the results of the compiled function and of the plain function, for inputs from 0 to 2."""

    def plain_function(numbers: torch.Tensor) -> torch.Tensor:
        return torch.sin(numbers) * numbers + 1

    numbers = torch.linspace(0, 2, 4096, device=device)
    compiled_function = torch.compile(plain_function, fullgraph=True)
    return float((compiled_function(numbers) - plain_function(numbers)).abs().max())


def main() -> None:
    """Print, as JSON, the difference between compiled and plain results on the first GPU."""
    sys.stdout.write(json.dumps({"difference": measure_largest_difference(torch.device("cuda", 0))}) + "\n")
