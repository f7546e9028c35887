"""Runs a command such as ssh, and removes from its output every escape sequence that could control the user's terminal.

A command that draws a live table uses escape sequences for styles and cursor movements. The few sequences that rich uses for
live tables are passed on to the terminal, and all other sequences are removed. The cursor never moves above the first line that
the command wrote: otherwise a hostile cluster could change what the user's own commands and shell have said.
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

from shardlab.terminal import printable

PART_BYTES = 2**16  # bytes that are read from a pipe at a time
# After the command has ended, its output pipes are read until no output has arrived for this time (seconds). The pipes may
# never reach their end, because a background process of the command may hold them open.
DRAIN_S = 0.2
END_S = 2.0  # seconds from SIGTERM to SIGKILL
# set a style; hide, show or move the cursor; clear a line
_DRAWING_SEQUENCE = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|[0-9]*A|2K)|\r")
_UNFINISHED_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]{0,20})?\Z")


class TerminalFilter:
    """Filters one output stream of a command, which arrives in parts.

    keeps_drawing: whether to pass on the escape sequences that rich uses for live tables. Only one stream of a command may
    draw. start_mark: text up to the line that ends with this word is dropped; empty: no text."""

    def __init__(self, *, keeps_drawing: bool, start_mark: str = "") -> None:
        self._keeps_drawing = keeps_drawing
        self._mark_pattern = re.compile(rf".*?{start_mark}\r?\n", re.S)
        self.early_text: str | None = "" if start_mark else None
        """The text before the mark, as long as the mark has not come; then None."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished_sequence = ""
        self._cursor_line = 0  # the line of the cursor, counted from the line on which this stream began

    def filter_part(self, output_part: bytes, *, is_last: bool = False) -> str:
        """The filtered text of the next part. An incomplete escape sequence at the end of the part is kept for the next part.

        is_last: whether no further part follows.
        """
        decoded_text = self._decoder.decode(output_part, is_last)
        if self.early_text is not None:
            decoded_text = self.early_text + decoded_text
            mark_match = self._mark_pattern.match(decoded_text)
            self.early_text = None if mark_match else decoded_text[-PART_BYTES:]
            decoded_text = decoded_text[mark_match.end() :] if mark_match else ""
        decoded_text = self._unfinished_sequence + decoded_text
        incomplete_sequence = None if is_last else _UNFINISHED_SEQUENCE.search(decoded_text)
        self._unfinished_sequence = incomplete_sequence[0] if incomplete_sequence else ""
        decoded_text = decoded_text[: incomplete_sequence.start()] if incomplete_sequence else decoded_text
        if not self._keeps_drawing:
            return printable.replace_invisible(decoded_text)
        text_pieces, text_position = [], 0
        for sequence in _DRAWING_SEQUENCE.finditer(decoded_text):
            text_pieces += [self._filter_text(decoded_text[text_position : sequence.start()]), self._limit_cursor(sequence[0])]
            text_position = sequence.end()
        return "".join([*text_pieces, self._filter_text(decoded_text[text_position:])])

    def _filter_text(self, output_text: str) -> str:
        visible_text = printable.replace_invisible(output_text)
        self._cursor_line += visible_text.count("\n")
        return visible_text

    def _limit_cursor(self, sequence: str) -> str:
        """An escape sequence that rich uses; a movement of the cursor to a line above is shortened, or left out."""
        if not sequence.endswith("A"):
            return sequence
        line_count = min(int(sequence[2:-1][:9] or 1) or 1, self._cursor_line)
        self._cursor_line -= line_count
        return f"\x1b[{line_count}A" if line_count else ""


def relay_command(argv: Sequence[str], *, uses_terminal: bool, start_mark: str) -> tuple[int, str | None]:
    """Run a command and print its filtered output.

    argv: the words of the command. uses_terminal: whether the command draws live tables on the terminal, and reads from it;
    other input is not for the command: it may be a list that a script of the user reads. start_mark: the command prints it on a
    line; earlier text on standard output is dropped.
    Returns (exit code, the earlier text if the mark did not come, otherwise None).
    """
    output_filter = TerminalFilter(keeps_drawing=uses_terminal, start_mark=start_mark)
    stdin = None if uses_terminal else subprocess.DEVNULL
    process = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with selectors.DefaultSelector() as pipe_selector:
            pipe_selector.register(process.stdout, selectors.EVENT_READ, (output_filter, sys.stdout))
            pipe_selector.register(process.stderr, selectors.EVENT_READ, (TerminalFilter(keeps_drawing=False), sys.stderr))
            while pipe_selector.get_map():
                ready_pipes = pipe_selector.select(DRAIN_S)
                if not ready_pipes and process.poll() is not None:
                    break
                for pipe_key, _ in ready_pipes:
                    text_filter, terminal_stream = pipe_key.data
                    if not _relay_part(pipe_key.fd, text_filter, terminal_stream):
                        pipe_selector.unregister(pipe_key.fileobj)
        return process.wait(), output_filter.early_text
    finally:
        _end_process(process)
        process.stdout.close()
        process.stderr.close()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End the command if it is still running. SIGTERM comes first, so that ssh can restore the settings of the terminal."""
    try:
        process.terminate()
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _relay_part(descriptor: int, text_filter: TerminalFilter, terminal_stream: TextIO) -> bool:
    """Read the next part of the command's output from a pipe, and write the filtered text to `terminal_stream`.

    descriptor: the descriptor of the pipe. text_filter: the filter of this pipe. Returns False at the end of the pipe.
    """
    output_part = os.read(descriptor, PART_BYTES)
    terminal_stream.write(text_filter.filter_part(output_part, is_last=not output_part))
    terminal_stream.flush()
    return bool(output_part)
