"""shardlab finds the steps whose measured time includes a suspension of the run, in which its processes stood still."""

import pytest

from shardlab.runs import suspension
from shardlab.runs.record import Event, StepRecord


def event(name, wall_s, **data):
    return Event(schema=1, event=name, writer="attempt", wall_s=wall_s, host="a", data=data)


def step(number, end_s, seconds, **more):
    return StepRecord(schema=1, step=number, t_s=0.0, wall_s=end_s, units=8, step_ms=1000 * seconds, **more)


def test_a_suspension_ends_at_the_time_of_its_event():
    """The event `stood_still` is written when a suspension ends, so the suspension lies before the time of the event."""
    noted = [event("started", 5.0), event("stood_still", 100.0, seconds=40.0), event("stood_still", 200.0)]
    assert suspension.read_suspensions(noted) == [(60.0, 100.0)]
    assert suspension.sum_durations_s(suspension.read_suspensions(noted)) == 40.0
    # This suspension was recorded later than it ended, by the next start of the run, so the event says when it ended.
    assert suspension.read_suspensions([event("stood_still", 300.0, seconds=40.0, ended_s=100.0)]) == [(60.0, 100.0)]


@pytest.mark.parametrize(
    ("end_s", "seconds", "holds"),
    [(59.0, 3.0, False), (100.5, 41.0, True), (60.5, 1.0, True), (100.5, 1.0, True), (103.0, 2.0, False)],
)
def test_a_step_that_overlaps_a_pause_is_set_aside(end_s, seconds, holds):
    record = step(1, end_s, seconds, loss=2.0)
    (found,) = suspension.mark_suspended([record], [(60.0, 100.0)])
    assert (found.watched, found.loss, found.step_ms) == (holds, 2.0, 1000 * seconds)


def test_records_without_a_suspension_are_unchanged():
    records = [step(1, 10.0, 1.0), step(2, 12.0, 1.0, watched=True)]
    assert suspension.mark_suspended(records, []) is records
    assert suspension.mark_suspended(records, [(60.0, 100.0)]) == records
