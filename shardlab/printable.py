"""Text of a node or of somebody's file, made safe to show.

Such text may hold escape sequences that steer a terminal, marks that turn the reading direction, or letters without width.
All of them can hide or forge what a person reads. Every output of ours goes through this file: `shardlab.console` for the
terminal, `templates.render_page` for the report, and the tables, figures and exports of `collect`.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec

LONGEST_LINE = 4000  # characters: 50 lines of a terminal that is 80 wide
REPLACEMENT = "?"  # every encoding and every font has this character
_CSI = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]")  # ECMA-48: colours and movements of the cursor, which hold no text
_LINE_END = re.compile(r"\r\n?")


def clean(text: str) -> str:
    """The text with its line breaks, and else only with visible characters and plain spaces.

    Colours are removed. Any other control character, bidirectional mark, character without width or lone surrogate becomes "?".
    A tab and every other kind of space become plain spaces. A line is cut after LONGEST_LINE characters.
    """
    if len(text) <= LONGEST_LINE and text.isprintable():
        return text
    return "\n".join(line if len(line) <= LONGEST_LINE else _cut(line) for line in visible(text).split("\n"))


def one_line(text: str) -> str:
    """The text as `clean` makes it, with spaces in the place of line breaks."""
    return clean(text).replace("\n", " ")


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A value made of dicts and lists, with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {mapped(key, change): mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(entry, change) for entry in value]
    return value


def json(value: Any) -> bytes:
    """`value` as JSON, with an escape such as \\u202e in the place of every character that `clean` would not show.

    A program reads the very text that a node wrote, and a terminal gets nothing that steers it. Only a lone surrogate, which no
    UTF-8 and few readers of JSON can hold, becomes "?".
    """
    try:
        document = msgspec.json.encode(value)
    except UnicodeEncodeError:
        without = mapped(msgspec.to_builtins(value), lambda text: text.encode("utf-8", "replace").decode())
        document = msgspec.json.encode(without)
    return escaped(document)


def escaped(document: bytes) -> bytes:
    """A text of JSON with an escape in the place of every character that `clean` would not show."""
    if document.isascii() and b"\x7f" not in document:  # JSON itself escapes the other control characters of ASCII
        return document
    return "".join(char if char.isprintable() else _json_escape(char) for char in document.decode()).encode()


class LogText:
    """A log as text to show, of parts that are given in the order of the file. A part may end within a line or a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._column = 0  # how many characters the last line has so far

    def add(self, part: bytes) -> str:
        """What to show of the next part. A carriage return begins a new line, so that nothing is written over."""
        shown = []
        for place, line in enumerate(visible(self._decoder.decode(part)).split("\n")):
            if place:
                shown.append("\n")
                self._column = 0
            room = max(LONGEST_LINE - self._column, 0)
            shown.append(line[:room])
            self._column += len(line)
            if self._column > LONGEST_LINE and self._column - len(line) <= LONGEST_LINE:
                shown.append(" ... (the log file has the rest of this line)")
        return "".join(shown)


def visible(text: str) -> str:
    """The text as `clean` makes it, with lines of any length."""
    text = _LINE_END.sub("\n", _CSI.sub("", text)).expandtabs()
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else _shown(char) for char in text)


def _shown(char: str) -> str:
    return " " if unicodedata.category(char) == "Zs" else REPLACEMENT


def _cut(line: str) -> str:
    return f"{line[:LONGEST_LINE]} ... ({len(line) - LONGEST_LINE:,} more characters)"


def _json_escape(char: str) -> str:
    """The escape of a character in a text of JSON, in two halves if it lies beyond the first plane of Unicode."""
    units = char.encode("utf-16-be").hex()
    return "".join(f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4))
