"""The key `retry` of a matrix: how often a run is started again automatically, for each state in which it may end."""

from __future__ import annotations

from typing import Annotated

import msgspec

SHARED_ON_SLURM = ("node_fail", "preempted")  # states after which Slurm starts a job again without a request
RetryCount = Annotated[int, msgspec.Meta(ge=0, le=100)]


class Retry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a run is started again automatically after it ended in each of these states.

    null: as often as `slurm.requeue` of the cluster file says; on clusters without Slurm never. A run that completed or that a
    person cancelled is never started again, and neither is a run that ended in a state that its cell expects.
    """

    oom: RetryCount = 0
    """The number of retries after the run was out of memory."""
    failed: RetryCount = 0
    """The number of retries after the run ended with an error."""
    hung: RetryCount = 0
    """The number of retries after the run made no progress for its hang limit."""
    node_fail: RetryCount | None = None
    """The number of retries after a node failed. On Slurm, the larger of the numbers of `node_fail` and `preempted` is the
    limit for both states together."""
    preempted: RetryCount | None = None
    """The number of retries after the scheduler ended the run in favour of another job."""
    timeout: RetryCount | None = None
    """The number of retries after the run reached its time limit. A retry starts only if the run saved a newer checkpoint than
    the checkpoint from which the run started."""

    def find_retry_limit(self, end_state: str, default_limit: int, *, on_slurm: bool) -> int:
        """How often a run may be started again after it ended in this state.

        On Slurm, node_fail and preempted share the larger of their numbers: Slurm starts a job again after both, and does not
        tell the run which of the two happened.
        end_state: one of shardlab.runs.state.STATES. default_limit: the number for a state whose number is null.
        """
        limiting_states = SHARED_ON_SLURM if on_slurm and end_state in SHARED_ON_SLURM else (end_state,)
        return max(self._find_limit(each_state, default_limit) for each_state in limiting_states)

    def _find_limit(self, end_state: str, default_limit: int) -> int:
        limit: int | None = getattr(self, end_state) if end_state in self.__struct_fields__ else 0
        return default_limit if limit is None else limit
