"""Who has done how many steps and on how old parameters: what a server decides by, and what the result tells of it."""

from __future__ import annotations

from collections import Counter

import msgspec


class Mode(msgspec.Struct, frozen=True):
    """How a server treats pushes.

    waits: for the gradients of all workers, whose mean makes one update (else each push is an update at once).
    staleness_bound: a worker begins a step only while it has finished at most so many more than the slowest worker (the
    clock distance of Ho et al., 2013), or None. staleness_weighted: a gradient counts 1 / (1 + staleness) of itself.
    pull_interval: parameters are pulled with every k-th push of a worker.
    """

    waits: bool = False
    staleness_bound: int | None = None
    staleness_weighted: bool = False
    pull_interval: int = 1


class Ledger:
    """Of one server; nothing in it waits or sends.

    Staleness of a push: the updates that were made to the parameters since its worker pulled those that the gradient was
    computed on. It counts its own updates as well where a worker does not pull them (pull_interval above 1).
    """

    def __init__(self, workers: int, mode: Mode) -> None:
        self.mode = mode
        self.updates = 0  # also the version of the parameters
        self.steps = [0] * workers  # that each worker has pushed
        self.pulls = 0  # of all workers
        self.staleness: Counter[int] = Counter()  # staleness -> pushes
        self.largest_lead = 0  # steps finished beyond the slowest worker's, of any worker as it began a step
        self.present = set(range(workers))
        self.lost: set[int] = set()

    def push(self, worker: int, version: int) -> float:
        """Note a push of a gradient computed on this version; the weight that it has in the update."""
        staleness = self.updates - version
        self.staleness[staleness] += 1
        self.steps[worker] += 1
        return 1 / (1 + staleness) if self.mode.staleness_weighted else 1.0

    def go_on(self, updates: int) -> None:
        """Stand as after so many updates with the gradients of all workers, each of which has pulled after each of them."""
        self.updates, self.pulls = updates, updates * len(self.steps)
        self.steps = [updates] * len(self.steps)
        self.staleness = Counter({0: self.pulls})

    def may_begin(self, worker: int) -> bool:
        """Whether a worker may begin its next step now."""
        return self.mode.staleness_bound is None or self._lead(worker) <= self.mode.staleness_bound

    def begin(self, worker: int) -> None:
        """Note that it does."""
        self.largest_lead = max(self.largest_lead, self._lead(worker))

    def leave(self, worker: int, *, lost: bool) -> None:
        """A worker is gone; nobody waits for it any more."""
        self.present.discard(worker)
        if lost:
            self.lost.add(worker)

    def _lead(self, worker: int) -> int:
        return self.steps[worker] - min(self.steps[other] for other in self.present)
