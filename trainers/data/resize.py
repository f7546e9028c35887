"""Resize whole batches of small images by two matrix products, in a fraction of the time of one call an image."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def resized(images: np.ndarray, size: int) -> np.ndarray:
    """Bilinear, (n, c, h, w) to (n, c, size, size) in float32, as Pillow's BILINEAR: shrinking averages over what it spans."""
    import numpy as np

    height, width = images.shape[-2:]
    images = images.astype(np.float32, copy=False)
    if (height, width) == (size, size):
        return images
    result: np.ndarray = _weights(height, size) @ images @ _weights(width, size).T
    return result


@functools.cache
def _weights(source: int, target: int) -> np.ndarray:
    """Each of `target` pixels as a mean of `source` pixels, (target, source): a triangle about its centre."""
    import numpy as np

    scale = source / target
    centres = (np.arange(target) + 0.5) * scale
    distance = np.abs(np.arange(source) + 0.5 - centres[:, None]) / max(scale, 1.0)
    triangle = np.maximum(0.0, 1.0 - distance)
    weights: np.ndarray = (triangle / triangle.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights
