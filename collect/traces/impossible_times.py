"""Finds events whose time cannot be true: profilers write time zero, or a negative time, for an event whose time was lost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def find_impossible_times(
    device: NDArray[np.int16],
    stream: NDArray[np.int64],
    correlation: NDArray[np.int64],
    start_ns: NDArray[np.int64],
    duration_ns: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which events start at a negative time, or at time zero although the recording began later. Shape (number of events,).

    A trace whose times count from its own start has true events at time zero. So an event at time zero counts only if the first
    event after time zero is further away than the recording is long, or if the call that launched the event starts later.
    """
    is_impossible: NDArray[np.bool_] = start_ns < 0
    is_zero, is_later = start_ns == 0, start_ns > 0
    if not is_zero.any() or not is_later.any():
        return is_impossible
    first_ns = start_ns[is_later].min()
    if first_ns > (start_ns + duration_ns)[is_later].max() - first_ns:
        is_impossible |= is_zero
        return is_impossible
    is_of_gpu = (device >= 0) & (stream >= 0) & (correlation > 0)
    launched_later = np.isin(correlation, correlation[is_later & ~is_of_gpu & (correlation > 0)])
    is_impossible |= is_zero & is_of_gpu & launched_later
    return is_impossible
