"""The state of runs whose nodes were taken back at the end of their lease: `node_fail`, with that reason."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from jobs.scheduler import ObservedRun, RunOnDisk
from shardlab import moments
from shardlab.lease import Lease
from shardlab.record import Sample, read_lines
from shardlab.state import JudgedState

# A run that was at work when the lease ended has records up to the end: samples twice a second, steps, events. This allows for
# records that the nodes still had to write to the shared folder.
NEAR = timedelta(minutes=10)


def verdict(run: RunOnDisk, seen: ObservedRun, lease: Lease | None, ended: datetime | None, now: datetime) -> JudgedState:
    """The state of a run, after the end of the lease; before it, and without a lease, the state that the scheduler observed.

    ended: when its supervisor saw it end, if it did. A scheduler that answers is believed: the lease may have been extended.
    """
    state = seen.verdict.state
    if lease is None or not lease.has_ended(now):
        return seen.verdict
    over = f"the lease of the nodes ended {moments.in_words(lease.expires)}"
    if state == "node_fail" and (ended is None or ended >= lease.expires) and _last_record(run) >= lease.expires - NEAR:
        return JudgedState(state, f"{over}: {seen.verdict.why}")
    if not seen.unanswered or state not in ("pending", "running") or (last := _last_record(run)) >= lease.expires:
        return seen.verdict
    if state == "pending":
        return JudgedState("node_fail", f"{over} before the run started")
    if last >= lease.expires - NEAR:
        return JudgedState("node_fail", f"{over} while the run was running")
    return JudgedState("unknown", f"{over}, and the records here end {moments.in_words(last)}: how the run ended is not known")


def _last_record(run: RunOnDisk) -> datetime:
    """The time of the last record in the run's folder, by the clocks of the nodes."""
    moments_s = [event.wall_s for event in run.events]
    moments_s += [record.wall_s for record in run.folder.steps(0).records[-1:]]
    for host in run.folder.hosts():
        moments_s += [sample.wall_s for sample in read_lines(run.folder.samples_file(host), Sample).records[-1:]]
    return datetime.fromtimestamp(max(moments_s, default=0.0), UTC)
