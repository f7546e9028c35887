"""Cancels jobs that wait in a scheduler's queue although their runs have ended. Otherwise these jobs might wait for ever."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jobs.scheduler import scheduler
from jobs.status.reconcile import Status


class CancelledJobs(msgspec.Struct, frozen=True):
    """The result of `cancel_stale_jobs`: what was done about jobs whose runs have ended."""

    sentences: list[str]
    """A sentence for each job."""
    are_all_cancelled: bool
    """Whether the scheduler cancelled all these jobs."""


def cancel_stale_jobs(runs: Sequence[Status]) -> CancelledJobs:
    """For each of these runs that has ended: cancel the job of the run if the job is still queued (`Status.leftover`)."""
    sentences, all_gone = [], True
    for run in runs:
        if not run.leftover:
            continue
        job_id, scheduler_words = run.scheduler["id"], run.scheduler["raw"]
        refusals = scheduler(run.scheduler["name"]).cancel_jobs([job_id])
        all_gone = all_gone and not refusals
        outcome_clause = f"cancelling the job failed: {refusals}" if refusals else "the job was cancelled"
        sentences.append(
            f"{run.id}: the run is {run.state}, but its job {job_id} was still in the queue "
            f"({scheduler_words}); {outcome_clause}."
        )
    return CancelledJobs(sentences, all_gone)
