"""Encodes the UUID of a rank's GPU as numbers, so that ranks can gather the UUIDs with a collective."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

COUNT = 4  # numbers of 32 bits, which float64 holds exactly


def numbers(device: torch.device) -> list[float]:
    """The UUID of this GPU in COUNT numbers; NaN for a CPU."""
    import torch

    if device.type != "cuda":
        return [math.nan] * COUNT
    whole = uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes
    return [float(int.from_bytes(whole[start : start + 4])) for start in range(0, 16, 4)]


def names(rows: np.ndarray | Sequence[Sequence[float]]) -> list[str]:
    """The UUIDs of rows of `numbers`, each once, in NVML's form (GPU-...), in the order of the rows."""
    found: dict[str, None] = {}
    for row in rows:
        if not any(map(math.isnan, row)):
            found[f"GPU-{uuid.UUID(bytes=b''.join(int(number).to_bytes(4) for number in row))}"] = None
    return list(found)
