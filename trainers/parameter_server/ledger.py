"""Counts the steps of each worker and the age of the parameters that it used, for the server's decisions and the result."""

from __future__ import annotations

from collections import Counter

import msgspec


class ServerMode(msgspec.Struct, frozen=True):
    """How a server treats pushes."""

    waits: bool = False
    """Whether the server waits for the gradients of all workers and makes one update with their mean; if not, each push is an
    update at once."""
    staleness_bound: int | None = None
    """A worker may begin a step only if it has finished at most this many steps more than the slowest worker (the clock
    distance of Ho et al., 2013). None: no bound."""
    staleness_weighted: bool = False
    """Whether a gradient is weighted by 1 / (1 + staleness)."""
    pull_interval: int = 1
    """K, if a worker pulls parameters with every k-th push."""


class Ledger:
    """The ledger of one server. It only counts; it never waits or sends.

    Staleness of a push: the number of updates since its worker pulled the parameters on which it computed the gradient. With
    pull_interval above 1, this includes the worker's own updates that it has not pulled.
    """

    def __init__(self, worker_count: int, mode: ServerMode) -> None:
        self.mode = mode
        self.update_count = 0  # the number of updates so far, which is also the version of the parameters
        self.steps_by_worker = [0] * worker_count  # number of steps that each worker has pushed
        self.pull_count = 0  # number of pushes of all workers with which they pulled parameters
        self.pushes_by_staleness: Counter[int] = Counter()  # staleness -> number of pushes
        self.largest_lead = 0  # the most steps that a worker was ahead of the slowest worker when it began a step
        self.present_workers = set(range(worker_count))
        self.lost_workers: set[int] = set()

    def record_push(self, worker: int, version: int) -> float:
        """Record a push and return the weight of its gradient in the update. version: the version of the parameters with which
        the gradient was computed."""
        staleness = self.update_count - version
        self.pushes_by_staleness[staleness] += 1
        self.steps_by_worker[worker] += 1
        return 1 / (1 + staleness) if self.mode.staleness_weighted else 1.0

    def resume_at(self, update_count: int) -> None:
        """Set the counts for a run that resumes. update_count: the number of updates before the checkpoint. Each of them had
        gradients of all workers, and each worker pulled the parameters after every update."""
        self.update_count, self.pull_count = update_count, update_count * len(self.steps_by_worker)
        self.steps_by_worker = [update_count] * len(self.steps_by_worker)
        self.pushes_by_staleness = Counter({0: self.pull_count})

    def may_begin(self, worker: int) -> bool:
        """Whether a worker may begin its next step now."""
        return self.mode.staleness_bound is None or self._count_steps_ahead(worker) <= self.mode.staleness_bound

    def record_begin(self, worker: int) -> None:
        """Record that a worker begins its next step."""
        self.largest_lead = max(self.largest_lead, self._count_steps_ahead(worker))

    def record_leave(self, worker: int, *, is_lost: bool) -> None:
        """Record that a worker has ended; no other worker waits for it any more."""
        self.present_workers.discard(worker)
        if is_lost:
            self.lost_workers.add(worker)

    def _count_steps_ahead(self, worker: int) -> int:
        return self.steps_by_worker[worker] - min(self.steps_by_worker[other_worker] for other_worker in self.present_workers)
