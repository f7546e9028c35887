"""The progress of transfers (bytes, rate, time left), printed as messages or as one updated line on a terminal."""

import io

from collect.fetching.progress import MIB, TransferProgress, show_progress
from shardlab.terminal.console import Output
from shardlab.terminal.rich_console import CleanConsole


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_remarks_name_bytes_rate_and_time_left_of_all_transfers_together():
    clock, said = Clock(), []
    progress = TransferProgress(said.append, read_clock=clock)
    first, second = progress.begin_transfer(60 * MIB), progress.begin_transfer(140 * MIB)
    clock.now += 1
    first(10 * MIB)
    assert said == []
    clock.now += 1
    second(30 * MIB)
    assert said == ["40.0 of 200.0 MiB, 30.0 MiB/s, 5 s left"]
    clock.now += 9
    first(60 * MIB)
    assert len(said) == 1
    clock.now += 1
    second(50 * MIB)
    # The rate counts the last ten seconds, in which 70 MiB arrived: 7 MiB/s.
    assert said[1:] == ["110.0 of 200.0 MiB, 7.0 MiB/s, 13 s left"]


def test_no_rate_and_no_remaining_time_are_shown_while_nothing_arrives():
    clock, said = Clock(), []
    progress = TransferProgress(said.append, read_clock=clock)
    report = progress.begin_transfer(100 * MIB)
    clock.now += 3
    report(0)
    assert said == ["0.0 of 100.0 MiB"]


def test_the_wait_for_the_first_bytes_does_not_count_as_a_slow_transfer():
    """After a broken connection, the other end first hashes what it had sent before."""
    clock, said = Clock(), []
    report = TransferProgress(said.append, read_clock=clock).begin_transfer(1000 * MIB)
    clock.now += 60
    report(MIB // 10)
    assert said == ["0.1 of 1,000.0 MiB"]
    clock.now += 10
    report(200 * MIB)
    assert said[1:] == ["200.0 of 1,000.0 MiB, 20.0 MiB/s, 40 s left"]


def test_a_wait_is_reported_once():
    clock, said = Clock(), []
    progress = TransferProgress(said.append, read_clock=clock)
    look = progress.make_wait_check("gpu1: the node reads.")
    assert not look()
    clock.now += 2
    assert not look()
    assert not look()
    assert said == ["gpu1: the node reads."]
    progress.stop()
    assert look()


def test_a_terminal_has_a_line_instead_of_remarks():
    output, stream = Output(), io.StringIO()
    output.remarks.console = CleanConsole(file=stream, force_terminal=True, width=80, soft_wrap=True)
    output.remarks.is_terminal = True
    with show_progress(output) as progress:
        assert stream.getvalue() == ""  # no progress line before the first transfer: the login may still ask for a code
        report = progress.begin_transfer(10 * MIB)
        report(5 * MIB)
    assert "5.0 of 10.0 MiB" in stream.getvalue()
