"""Ranks measure the offsets between their clocks by repeated gathers. The true offset lies within the bound that is reported
with the measured one."""

import threading
import time

import numpy as np
import pytest

from trainers.ranks import clock_check


class Meeting:
    """Connects ranks that are threads of this process. `all_gather_numbers` returns only after all threads have called it."""

    def __init__(self, ranks):
        self._rows, self._barrier = [None] * ranks, threading.Barrier(ranks)

    def of(self, rank):
        meeting = self

        class Rank:
            def all_gather_numbers(self, numbers):
                meeting._rows[rank] = list(numbers)
                meeting._barrier.wait()
                found = np.array(meeting._rows)
                meeting._barrier.wait()
                return found

        return Rank()


def at_once(rank, ranks):
    """Runs the function once for each rank, each time in a new thread, and waits for all threads. rank: a function of the
    rank's number."""
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("ahead_s", [0.0, 7.25, -3600.0])
def test_an_offset_is_found_within_its_bound(ahead_s):
    meeting, found = Meeting(3), {}

    def rank(number):
        clock = time.monotonic if number != 2 else lambda: time.monotonic() + ahead_s
        found[number] = clock_check.measure_offset(meeting.of(number), clock)

    at_once(rank, 3)
    for number, true_s in ((0, 0.0), (1, 0.0), (2, ahead_s)):
        assert abs(found[number].offset_s - true_s) <= found[number].within_s + 1e-9
        assert found[number].within_s >= 0


def test_a_clock_that_is_set_meanwhile_has_no_offset():
    meeting, found = Meeting(2), {}

    def rank(number):
        asked = iter(range(1000))
        clock = (
            time.monotonic if number == 0 else lambda: time.monotonic() + (3600 if next(asked) > clock_check.ROUND_COUNT else 0)
        )
        found[number] = clock_check.measure_offset(meeting.of(number), clock)

    at_once(rank, 2)
    assert found[1] is None
