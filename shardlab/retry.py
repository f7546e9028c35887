"""The key `retry` of a matrix: how often a run is started again automatically, for each state in which it may end."""

from __future__ import annotations

from typing import Annotated

import msgspec

Times = Annotated[int, msgspec.Meta(ge=0, le=100)]


class Retry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a run is started again by itself after it ended in each of these states.

    null: as often as `slurm.requeue` of the cluster file says; on clusters without Slurm never. A run that completed or that a
    person cancelled is never started again, and neither is a run that ended in a state that its cell expects.
    """

    oom: Times = 0
    """After the run was out of memory."""
    failed: Times = 0
    """After the run ended with an error."""
    hung: Times = 0
    """After the run made no progress for its hang limit."""
    node_fail: Times | None = None
    """After a node failed. On Slurm, node_fail and preempted share the larger of their two numbers."""
    preempted: Times | None = None
    """After the scheduler ended the run in favour of another job."""
    timeout: Times | None = None
    """After the run reached its time limit, and only if it saved a newer checkpoint than the one that it started from."""

    def after(self, state: str, otherwise: int) -> int:
        """How often a run may be started again after it ended in this state.

        state: one of shardlab.state.STATES. otherwise: the number for a state whose number is null.
        """
        times: int | None = getattr(self, state) if state in self.__struct_fields__ else 0
        return otherwise if times is None else times
