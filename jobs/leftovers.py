"""Cancels jobs that wait in a scheduler's queue although their runs have ended: they might wait there for ever."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jobs.reconcile import Status
from jobs.scheduler import scheduler


class Cancelled(msgspec.Struct, frozen=True):
    """sentences: one for each job. all_gone: whether the scheduler cancelled every one of them."""

    sentences: list[str]
    all_gone: bool


def cancel(found: Sequence[Status]) -> Cancelled:
    """Cancel the leftover job of each of these runs."""
    sentences, all_gone = [], True
    for one in found:
        if not one.leftover:
            continue
        job, raw = one.scheduler["id"], one.scheduler["raw"]
        refused = scheduler(one.scheduler["name"]).cancel_jobs([job])
        all_gone = all_gone and not refused
        became = f"cancelling the job failed: {refused}" if refused else "the job was cancelled"
        sentences.append(f"{one.id}: the run is {one.state}, but its job {job} was still in the queue ({raw}); {became}.")
    return Cancelled(sentences, all_gone)
