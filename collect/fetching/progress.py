"""Shows the progress of the transfers of one command: bytes that arrived, rate, and time left."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardlab.terminal.console import Output

if TYPE_CHECKING:  # only a terminal needs them, and their import takes as long as the rest of a small transfer
    from rich.live import Live
    from rich.text import Text

QUIET_LIMIT_S = 2.0  # after this many seconds without output, a remark says what the command waits for
REMARK_EVERY_S = 10.0  # seconds between two remarks about the progress
RATE_WINDOW_S = 10.0  # the transfer rate is the mean over the last 10 seconds
MIB = 2**20


class TransferProgress:
    """The progress of all transfers of a command.

    Several threads transfer files at the same time. Each thread reports to this object how many bytes have arrived, and asks it
    whether the command was interrupted.
    """

    def __init__(
        self,
        print_remark: Callable[[str], None] = lambda _: None,
        *,
        live_display: Live | None = None,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without any transfer.

        print_remark: prints a remark. live_display: a live display that shows the progress in place of remarks, from the first
        transfer on. read_clock: returns a time in seconds."""
        self.print_remark = print_remark
        self._live, self._read_clock = live_display, read_clock
        self._lock = threading.Lock()
        self._expected: list[int] = []  # for each transfer, its size in bytes
        self._arrived: list[int] = []  # for each transfer, the bytes that have arrived
        self._rate_samples: deque[tuple[float, int]] = deque()  # (time, bytes that had arrived) during the last RATE_WINDOW_S
        self._next_remark_s = 0.0
        self._stop_event = threading.Event()

    def stop(self) -> None:
        """Tell all transfers to stop, because the command was interrupted."""
        self._stop_event.set()

    def is_stopped(self) -> bool:
        """Whether the command was interrupted."""
        return self._stop_event.is_set()

    def begin_transfer(self, expected_bytes: int) -> Callable[[int], None]:
        """Register a new transfer of `expected_bytes` bytes.

        Returns a function that the transfer calls with the number of bytes that have arrived so far.
        """
        is_first = False
        with self._lock:
            if not self._expected:
                self._next_remark_s = self._read_clock() + QUIET_LIMIT_S
                self._rate_samples.append((self._read_clock(), 0))
                is_first = True
            transfer_number = len(self._expected)
            self._expected.append(expected_bytes)
            self._arrived.append(0)
        # The live display starts only with the first transfer, because a login before that may ask for a code here.
        if is_first and self._live is not None:
            self._live.update(self)
            self._live.start()
        return lambda arrived_bytes: self._report_arrived(transfer_number, arrived_bytes)

    def make_wait_check(self, waiting_text: str) -> Callable[[], bool]:
        """Returns a function that a loop calls repeatedly while it waits for an answer.

        Once QUIET_LIMIT_S have passed, the function prints `waiting_text`, one time only. It returns whether the command was
        interrupted."""
        print_due_s: list[float] = [self._read_clock() + QUIET_LIMIT_S]

        def print_and_check_stop() -> bool:
            if print_due_s and self._read_clock() >= print_due_s[0]:
                print_due_s.clear()
                self.print_remark(waiting_text)
            return self.is_stopped()

        return print_and_check_stop

    def get_text(self) -> str:
        """Bytes that arrived, transfer rate and time left, in one line; '' before the first transfer."""
        with self._lock:
            return self._make_progress_text(self._read_clock())

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(self.get_text())

    def _report_arrived(self, transfer_number: int, arrived_bytes: int) -> None:
        with self._lock:
            now_s = self._read_clock()
            if not any(self._arrived):  # the wait for the first bytes, in which the other end hashes files, is no transfer
                self._rate_samples.clear()
            self._arrived[transfer_number] = arrived_bytes
            self._rate_samples.append((now_s, sum(self._arrived)))
            while len(self._rate_samples) > 2 and self._rate_samples[1][0] <= now_s - RATE_WINDOW_S:
                self._rate_samples.popleft()
            is_due = self._live is None and now_s >= self._next_remark_s and sum(self._arrived) < sum(self._expected)
            progress_text = self._make_progress_text(now_s) if is_due else ""
            if is_due:
                self._next_remark_s = now_s + REMARK_EVERY_S
        if progress_text:
            self.print_remark(progress_text)

    def _make_progress_text(self, time_s: float) -> str:
        if not self._expected:
            return ""
        expected_bytes, arrived_bytes = sum(self._expected), sum(self._arrived)
        window_start_s, window_start_bytes = self._rate_samples[0]
        bytes_per_s = (arrived_bytes - window_start_bytes) / (time_s - window_start_s) if time_s > window_start_s else 0.0
        progress_text = f"{arrived_bytes / MIB:,.1f} of {expected_bytes / MIB:,.1f} MiB"
        if bytes_per_s <= 0:  # the rate is not known, or nothing arrives, so the time left cannot be computed
            return progress_text
        left_text = _format_duration(max(expected_bytes - arrived_bytes, 0) / bytes_per_s)
        return f"{progress_text}, {bytes_per_s / MIB:,.1f} MiB/s, {left_text} left"


def _format_duration(duration_s: float) -> str:
    whole_s = round(duration_s)
    if whole_s < 60:
        return f"{whole_s} s"
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60} s"
    return f"{whole_s // 3600} h {whole_s % 3600 // 60} min"


@contextmanager
def show_progress(output: Output) -> Iterator[TransferProgress]:
    """Provide a TransferProgress that is shown while the block runs.

    On a terminal, it is shown as a live line on standard error, which is removed at the end; otherwise as a remark every
    REMARK_EVERY_S seconds.
    """
    if not output.remarks.is_terminal:
        yield TransferProgress(output.print_remark)
        return
    from rich.live import Live

    live_display = Live(console=output.remarks.console, refresh_per_second=4, transient=True)
    try:
        yield TransferProgress(output.print_remark, live_display=live_display)
    finally:
        live_display.stop()
