"""Measures how far the clock of each node is from the clock of rank 0's node, so that records of several nodes can be compared.

All ranks meet a few times and tell each other when they came, and when they were done the time before. Nobody is done before
everybody has come, by any clock: each meeting bounds the difference of two clocks from both sides, and the best bounds count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardlab.record import CLOCK, ClockOffset

if TYPE_CHECKING:
    from shardlab.run import Run
    from shardlab.rundir import RunDir
    from trainers.ranks import Peers, Ranks

MEETINGS = 9


def check(run: Run, run_dir: RunDir, ranks: Ranks, peers: Peers, when: str) -> None:
    """The first rank of each node writes the event CLOCK; a run on one node has one clock. when: `start` or `end`."""
    if run.world.nnodes == 1:
        return
    found = offset(peers, time.time)
    if ranks.local_rank == 0 and found is not None:
        writer = f"rank-{ranks.rank:05d}"
        run_dir.write_event(writer, CLOCK, sync=False, when=when, offset_s=found.offset_s, within_s=found.within_s)


def offset(peers: Peers, clock: Callable[[], float]) -> ClockOffset | None:
    """The offset of this rank's clock; every rank calls it at once. None if the bounds contradict each other: a clock was set
    meanwhile."""
    came: list[tuple[float, float]] = []  # (of rank 0, of this rank) at each meeting
    done: list[tuple[float, float]] = []
    left = clock()
    for _ in range(MEETINGS + 1):
        entered = clock()
        rows = peers.gather([entered, left])
        came.append((float(rows[0, 0]), entered))
        done.append((float(rows[0, 1]), left))  # of the meeting before
        left = clock()
    pairs = list(zip(came, done[1:], strict=False))
    least = max(mine - done_there for (_, mine), (done_there, _) in pairs)
    most = min(done_here - theirs for (theirs, _), (_, done_here) in pairs)
    return ClockOffset((least + most) / 2, (most - least) / 2) if least <= most else None
