"""Decides the state of a run that was interrupted because the lease of its nodes (the time for which they are lent) ended.

The state follows only from the records of the run, because the scheduler, which could report the state, was on the nodes.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from shardlab.cluster.lease import Lease
from shardlab.runs.state import JudgedState
from shardlab.terminal import moments

# If the last record of a run was written at most this time before the end of the lease, the run was still running when the
# lease ended. A run writes samples twice a second, and steps and events. The ten minutes allow for records that the nodes had
# not yet written to the shared folder.
NEAR_LEASE_END = timedelta(minutes=10)


def judge_by_records(
    judged: JudgedState, lease: Lease | None, last_record_time: datetime, current_time: datetime
) -> JudgedState:
    """The state of a run; if the lease of its nodes ended before the run, the state says so instead of pending or running.

    judged: the state that follows from the records alone, which is returned in all other cases.
    lease: the lease of the nodes; None if it is not known.
    last_record_time: the time of the last record of the run, by the clocks of the nodes. current_time: the current time.
    A record that is newer than the end of the lease shows that the lease was extended; `judged` is then returned.
    """
    if lease is None or not lease.has_ended(current_time) or judged.state not in ("pending", "running"):
        return judged
    if last_record_time >= lease.expires:
        return judged
    lease_end_text = describe_lease_end(lease)
    if judged.state == "pending":
        return JudgedState("node_fail", f"{lease_end_text} before the run started")
    if was_running_at_end(last_record_time, lease):
        return JudgedState("node_fail", f"{lease_end_text} while the run was running")
    return JudgedState(
        "unknown",
        f"{lease_end_text}, and the records here end {moments.format_time(last_record_time)}: how the run ended is not known",
    )


def was_running_at_end(last_record_time: datetime, lease: Lease) -> bool:
    """Whether a run was still running when the lease ended. last_record_time: the time of the last record of the run."""
    return last_record_time >= lease.expires - NEAR_LEASE_END


def describe_lease_end(lease: Lease) -> str:
    """The end of the lease in words, as the beginning of a sentence that says why a run ended."""
    return f"the lease of the nodes ended {moments.format_time(lease.expires)}"
