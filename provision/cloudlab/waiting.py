"""Shows what a command waits for: on a terminal one live line with the elapsed time, in a pipe a new line for each change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.text import Text

from shardlab.terminal.console import Output

REPEAT_S = 60.0  # how often a line is printed into a pipe, even if nothing has changed


class WaitingLinePrinter:
    """Prints lines into a pipe: a line for each change, and at least one line each minute."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._began_s = time.monotonic()
        self._last_text = ""
        self._printed_s = 0.0

    def show(self, waiting_text: str) -> None:
        """Print what the command waits for now, unless the same text was printed less than REPEAT_S ago."""
        passed_s = time.monotonic() - self._began_s
        if waiting_text != self._last_text or passed_s - self._printed_s >= REPEAT_S:
            self._output.print_remark(f"{waiting_text} ({passed_s / 60:.0f} min)")
            self._last_text, self._printed_s = waiting_text, passed_s


@contextmanager
def show_waiting(output: Output, first_text: str) -> Iterator[Callable[[str], None]]:
    """During the block, show what the command waits for. Yields a function that replaces the shown text.

    first_text: the text that is shown at the beginning.
    """
    if not output.remarks.is_terminal:
        line_printer = WaitingLinePrinter(output)
        line_printer.show(first_text)
        yield line_printer.show
        return
    began_s = time.monotonic()
    with output.remarks.console.status(Text(first_text)) as status_display:

        def show(text: str) -> None:
            # in an object Text, rich does not interpret markup
            status_display.update(Text(f"{text} ({(time.monotonic() - began_s) / 60:.0f} min)"))

        yield show
