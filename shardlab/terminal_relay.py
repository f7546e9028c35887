"""Runs a command such as ssh, and removes from its output everything that could control our terminal.

A live table needs more than text: styles and cursor movements that rich uses are passed on, all other sequences are removed.
"""

from __future__ import annotations

import codecs
import os
import re
import selectors
import subprocess
import sys
from collections.abc import Sequence
from typing import TextIO

from shardlab import printable

PART = 2**16  # bytes
DRAIN_S = 0.2  # after its end, for what is still in the pipes: a process that it left behind may hold them open for ever
END_S = 2.0
_DRAWN = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|[0-9]*A|2K)|\r")  # styles; the cursor hidden, shown, moved up; a line cleared
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]{0,20})?\Z")


class TerminalFilter:
    """Filters the output of the command, which is given in parts. drawing: whether sequences that rich uses are passed on."""

    def __init__(self, *, drawing: bool) -> None:
        self._drawing = drawing
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = ""

    def add(self, part: bytes, *, last: bool = False) -> str:
        """What to write for the next part; an incomplete sequence at its end waits for the part after it."""
        text = self._unfinished + self._decoder.decode(part, last)
        cut = None if last else _UNFINISHED.search(text)
        self._unfinished = cut[0] if cut else ""
        text = text[: cut.start()] if cut else text
        if not self._drawing:
            return printable.visible(text)
        written, place = [], 0
        for drawn in _DRAWN.finditer(text):
            written += [printable.visible(text[place : drawn.start()]), drawn[0]]
            place = drawn.end()
        return "".join([*written, printable.visible(text[place:])])


def run(argv: Sequence[str], *, terminal: bool) -> int:
    """Run the command with our standard input; returns its exit code. terminal: whether its output is drawn on our terminal."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with selectors.DefaultSelector() as pipes:
            pipes.register(process.stdout, selectors.EVENT_READ, (TerminalFilter(drawing=terminal), sys.stdout))
            pipes.register(process.stderr, selectors.EVENT_READ, (TerminalFilter(drawing=terminal), sys.stderr))
            while pipes.get_map():
                ready = pipes.select(DRAIN_S)
                if not ready and process.poll() is not None:
                    break
                for key, _ in ready:
                    passing, stream = key.data
                    if not _pass(key.fd, passing, stream):
                        pipes.unregister(key.fileobj)
        return process.wait()
    finally:
        _end(process)
        process.stdout.close()
        process.stderr.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command if it has not ended. It is asked first: ssh then gives the terminal its own settings back."""
    try:
        process.terminate()
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pass(descriptor: int, passing: TerminalFilter, stream: TextIO) -> bool:
    """Write what a pipe has; False at its end."""
    part = os.read(descriptor, PART)
    stream.write(passing.add(part, last=not part))
    stream.flush()
    return bool(part)
