"""The state of a run that the end of the lease cut off, if only its records are known: no scheduler answers for it any more."""

from __future__ import annotations

from datetime import datetime, timedelta

from shardlab import moments
from shardlab.lease import Lease
from shardlab.state import JudgedState

# A run that was at work when the lease ended has records up to the end: samples twice a second, steps, events. This allows for
# records that the nodes still had to write to the shared folder.
NEAR = timedelta(minutes=10)


def judge_by_records(verdict: JudgedState, lease: Lease | None, last_record: datetime, now: datetime) -> JudgedState:
    """The verdict of the records, except for a run that had not ended when the lease ended.

    last_record: by the clocks of the nodes. Records from after the end of the lease say that it was extended.
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
    """Whether a run with this last record was at work when the lease ended."""
    return last_record >= lease.expires - NEAR


def in_words(lease: Lease) -> str:
    """The beginning of the reason why a run ended."""
    return f"the lease of the nodes ended {moments.in_words(lease.expires)}"
