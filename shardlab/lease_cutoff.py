"""The state of a run that the end of the lease interrupted.

The state follows only from the records of the run, because the scheduler is gone together with the nodes.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from shardlab import moments
from shardlab.lease import Lease
from shardlab.state import JudgedState

# If a run was running when the lease ended, its last record is at most this much older than the end. A run writes samples twice
# a second, and steps and events; the ten minutes allow for records that the nodes had not yet written to the shared folder.
NEAR = timedelta(minutes=10)


def judge_by_records(verdict: JudgedState, lease: Lease | None, last_record: datetime, now: datetime) -> JudgedState:
    """The state of a run, corrected if the lease ended before the run did; else the state is returned unchanged.

    verdict: the state that follows from the records alone. lease: the lease of the nodes, if it is known.
    last_record: the time of the last record, by the clocks of the nodes. now: the current time.
    Records that are newer than the end of the lease show that the lease was extended, so the state is not changed.
    """
    if lease is None or not lease.has_ended(now) or verdict.state not in ("pending", "running"):
        return verdict
    if last_record >= lease.expires:
        return verdict
    over = in_words(lease)
    if verdict.state == "pending":
        return JudgedState("node_fail", f"{over} before the run started")
    if is_near(last_record, lease):
        return JudgedState("node_fail", f"{over} while the run was running")
    return JudgedState(
        "unknown", f"{over}, and the records here end {moments.in_words(last_record)}: how the run ended is not known"
    )


def is_near(last_record: datetime, lease: Lease) -> bool:
    """Whether a run with this last record was still running when the lease ended."""
    return last_record >= lease.expires - NEAR


def in_words(lease: Lease) -> str:
    """The end of the lease in words, as the beginning of a sentence that says why a run ended."""
    return f"the lease of the nodes ended {moments.in_words(lease.expires)}"
