"""Shows what a command waits for: on a terminal a line with the time that passed, elsewhere a line for each change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.text import Text

from shardlab.console import Output

REPEAT_S = 60.0  # a line in a pipe, even if nothing has changed


class WaitingLines:
    """Lines for a pipe: one for each change, and one a minute."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._began = time.monotonic()
        self._last = ""
        self._said_s = 0.0

    def show(self, text: str) -> None:
        """What is waited for now."""
        passed_s = time.monotonic() - self._began
        if text != self._last or passed_s - self._said_s >= REPEAT_S:
            self._output.remark(f"{text} ({passed_s / 60:.0f} min)")
            self._last, self._said_s = text, passed_s


@contextmanager
def shown(output: Output, first: str) -> Iterator[Callable[[str], None]]:
    """During the block, the function that is yielded shows what is waited for."""
    if not output.remarks.is_terminal:
        lines = WaitingLines(output)
        lines.show(first)
        yield lines.show
        return
    began = time.monotonic()
    with output.remarks.status(Text(first)) as status:

        def show(text: str) -> None:
            status.update(Text(f"{text} ({(time.monotonic() - began) / 60:.0f} min)"))  # a Text: no markup is read in it

        yield show
