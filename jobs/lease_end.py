"""Decides the state of runs whose nodes were taken back at the end of the lease: `node_fail`, with the lease as reason."""

from __future__ import annotations

from datetime import UTC, datetime

from jobs.scheduler import ObservedRun, RunOnDisk
from shardlab import lease_cutoff
from shardlab.lease import Lease
from shardlab.record import Sample, read_lines
from shardlab.state import JudgedState


def verdict(run: RunOnDisk, seen: ObservedRun, lease: Lease | None, ended: datetime | None, now: datetime) -> JudgedState:
    """The state of a run, with the end of the lease taken into account.

    Without a lease, and before the lease ends, this is the state that the scheduler observed. After the end of the lease, the
    state by the scheduler still counts if the scheduler answers, because the lease may have been extended.

    seen: the state by the scheduler. ended: when the supervisor recorded the end of the run; None if it recorded no end. now:
    the current time.
    """
    if lease is None or not lease.has_ended(now):
        return seen.verdict
    is_lost = seen.verdict.state == "node_fail" and (ended is None or ended >= lease.expires)
    if is_lost and lease_cutoff.is_near(_last_record(run), lease):
        return JudgedState("node_fail", f"{lease_cutoff.in_words(lease)}: {seen.verdict.why}")
    return lease_cutoff.judge_by_records(seen.verdict, lease, _last_record(run), now) if seen.unanswered else seen.verdict


def _last_record(run: RunOnDisk) -> datetime:
    """The time of the last record in the run's folder, by the clocks of the nodes."""
    moments_s = [event.wall_s for event in run.events]
    moments_s += [record.wall_s for record in run.folder.steps(0).records[-1:]]
    for host in run.folder.hosts():
        moments_s += [sample.wall_s for sample in read_lines(run.folder.samples_file(host), Sample).records[-1:]]
    return datetime.fromtimestamp(max(moments_s, default=0.0), UTC)
