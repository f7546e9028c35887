"""A process measures for how long it was suspended. The clock is a stand-in that the tests set."""

import pytest
from support_clock import Clock
from support_e2e import until

from shardlab.runs import suspension
from shardlab.runs.suspension import MIN_SUSPENSION_S, POLL_S, SuspensionWatch


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(suspension, "time", made)
    return made


def test_a_long_gap_between_two_looks_is_a_suspension_and_reported_once(clock):
    """A gap of at least LEAST_S between two looks at the clock is a suspension. Each suspension is reported once."""
    watched = SuspensionWatch()
    clock.now += MIN_SUSPENSION_S
    assert watched.take_suspended_s() == MIN_SUSPENSION_S
    assert watched.take_suspended_s() == 0
    clock.now += MIN_SUSPENSION_S - 0.1
    assert watched.take_suspended_s() == 0


def test_a_caller_that_waits_for_a_disk_is_not_suspended(clock):
    """Time counts as suspended only if the thread of the watch did not run either, and not if only the caller waits."""
    watched = SuspensionWatch()
    for _ in range(100):  # each call of _measure_suspension stands for a look of the watch's thread at the clock
        clock.now += POLL_S
        watched._measure_suspension()
    assert watched.take_suspended_s() == 0
    clock.now += 30
    watched._measure_suspension()
    clock.now += 7
    assert watched.take_suspended_s() == 37


def test_the_thread_of_the_watch_reads_the_clock_and_ends_with_its_block():
    """The thread of the watch looks at the clock again and again, and ends with the `with` block."""
    with SuspensionWatch() as watched:
        before = watched._last_reading_s
        until(lambda: watched._last_reading_s > before, "the thread looks at the clock")
        assert not watched._stop_event.is_set()
    assert watched._stop_event.is_set()
