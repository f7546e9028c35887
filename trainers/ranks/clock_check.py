"""Measures how far the clock of each node is from the clock of rank 0's node, so that records of several nodes can be compared.

All ranks take part in a few collectives (all-gathers). In each collective a rank sends two times by its own clock: when it
entered this collective, and when it left the previous collective. No rank can leave a collective before every rank has entered
it. Therefore each collective gives a lower and an upper bound of the difference between two clocks; the tightest bounds of all
collectives are used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardlab.record_types import ClockOffset
from shardlab.runs.record import CLOCK_EVENT

if TYPE_CHECKING:
    from shardlab.runs.run import Run
    from shardlab.runs.rundir import RunDir
    from trainers.ranks.ranks import Peers, Ranks

ROUND_COUNT = 9


def measure_clock_offsets(run: Run, run_dir: RunDir, ranks: Ranks, peers: Peers, when: str) -> None:
    """Measure the offsets of the nodes' clocks; the first rank of each node writes the event CLOCK. A collective.

    Does nothing for a run on one node, which has only one clock. when: the moment that the event names, `start` or `end` of
    the training.
    """
    if run.world.nnodes == 1:
        return
    offset = measure_offset(peers, time.time)
    if ranks.local_rank == 0 and offset is not None:
        writer = f"rank-{ranks.rank:05d}"
        run_dir.write_event(writer, CLOCK_EVENT, sync=False, when=when, offset_s=offset.offset_s, within_s=offset.within_s)


def measure_offset(peers: Peers, clock: Callable[[], float]) -> ClockOffset | None:
    """The offset of this rank's clock from rank 0's clock, in seconds. A collective.

    Returns None if the bounds contradict each other, because a clock was set during the measurement.
    """
    # The times at which ranks entered and left the collectives, as pairs (time of rank 0, time of this rank). Each rank uses
    # its own clock.
    entered_times: list[tuple[float, float]] = []
    left_times: list[tuple[float, float]] = []
    left_s = clock()
    for _ in range(ROUND_COUNT + 1):
        entered_s = clock()
        times_by_rank = peers.all_gather_numbers([entered_s, left_s])
        entered_times.append((float(times_by_rank[0, 0]), entered_s))
        left_times.append((float(times_by_rank[0, 1]), left_s))  # `left_at` is still that of the previous collective
        left_s = clock()
    time_pairs = list(zip(entered_times, left_times[1:], strict=False))
    lower_bound = max(entered_here - left_there for (_, entered_here), (left_there, _) in time_pairs)
    upper_bound = min(left_here - entered_there for (entered_there, _), (_, left_here) in time_pairs)
    return ClockOffset((lower_bound + upper_bound) / 2, (upper_bound - lower_bound) / 2) if lower_bound <= upper_bound else None
