"""Cancels jobs that wait in a scheduler's queue although their runs have ended. Otherwise these jobs might wait for ever."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jobs.scheduler import find_scheduler
from jobs.status.reconcile import Status


class CancelledJobs(msgspec.Struct, frozen=True):
    """The result of `cancel_stale_jobs`: what was done about jobs whose runs have ended."""

    sentences: list[str]
    """A sentence for each job."""
    are_all_cancelled: bool
    """Whether the scheduler cancelled all these jobs."""


def cancel_stale_jobs(statuses: Sequence[Status]) -> CancelledJobs:
    """For each of these runs that has ended: cancel the job of the run if the job is still queued (`Status.leftover`)."""
    sentences, are_all_cancelled = [], True
    for status in statuses:
        if not status.leftover:
            continue
        job_id, scheduler_words = status.scheduler["id"], status.scheduler["raw"]
        refusal_words = find_scheduler(status.scheduler["name"]).cancel_jobs([job_id])
        are_all_cancelled = are_all_cancelled and not refusal_words
        outcome_clause = f"cancelling the job failed: {refusal_words}" if refusal_words else "the job was cancelled"
        sentences.append(
            f"{status.id}: the run is {status.state}, but its job {job_id} was still in the queue "
            f"({scheduler_words}); {outcome_clause}."
        )
    return CancelledJobs(sentences, are_all_cancelled)
