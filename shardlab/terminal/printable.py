"""Makes text from a node or from another person's file safe to show.

Such text may contain escape sequences that control a terminal, marks that change the reading direction, or characters without
width. All of these can hide or fake the text that a person reads. This module cleans the output of all parts of shardlab: the
terminal (`shardlab.terminal.console`), the report (`templates.render_page`), and the tables, figures and exports of `collect`.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec

LONGEST_LINE = 4000  # characters; such a line fills 50 lines of a terminal with 80 columns
REPLACEMENT_CHARACTER = "?"  # every encoding and every font has this character
_CONTROL_SEQUENCE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]")  # control sequences of ECMA-48: colours, cursor movements
_LINE_END = re.compile(r"\r\n?")


def clean_text(text: str) -> str:
    """The text with only visible characters, plain spaces and line breaks.

    Sequences for colours and cursor movements are removed. Every other control character, bidirectional mark, character without
    width or lone surrogate becomes "?". A tab and every other kind of space become plain spaces. A line is cut after
    LONGEST_LINE characters.
    """
    if len(text) <= LONGEST_LINE and text.isprintable():
        return text
    return "\n".join(line if len(line) <= LONGEST_LINE else _shorten_line(line) for line in replace_invisible(text).split("\n"))


def clean_to_one_line(text: str) -> str:
    """The text cleaned by `clean`, with a space instead of each line break."""
    return clean_text(text).replace("\n", " ")


def map_texts(nested_value: Any, change_text: Callable[[str], str]) -> Any:
    """A copy of a value that consists of dicts and lists, in which `change_text` was applied to every text, also to dict
    keys."""
    if isinstance(nested_value, str):
        return change_text(nested_value)
    if isinstance(nested_value, dict):
        return {map_texts(key, change_text): map_texts(inner_value, change_text) for key, inner_value in nested_value.items()}
    if isinstance(nested_value, list | tuple):
        return [map_texts(inner_value, change_text) for inner_value in nested_value]
    return nested_value


def encode_printable_json(json_value: Any) -> bytes:
    """`json_value` as JSON, with an escape such as \\u202e instead of every character that is not printable.

    A program that reads the JSON gets exactly the text that a node wrote, and a terminal that shows the JSON gets no control
    characters. Only a lone surrogate becomes "?", because UTF-8 and most JSON readers do not allow it.
    """
    try:
        json_bytes = msgspec.json.encode(json_value)
    except UnicodeEncodeError:
        encodable_value = map_texts(msgspec.to_builtins(json_value), lambda text: text.encode("utf-8", "replace").decode())
        json_bytes = msgspec.json.encode(encodable_value)
    return escape_unprintable(json_bytes)


def escape_unprintable(json_bytes: bytes) -> bytes:
    """A JSON document with an escape such as \\u202e instead of every character that is not printable."""
    if json_bytes.isascii() and b"\x7f" not in json_bytes:  # JSON escapes all control characters of ASCII except 7f
        return json_bytes
    return "".join(char if char.isprintable() else _make_json_escape(char) for char in json_bytes.decode()).encode()


class LogCleaner:
    """Turns a log into text that is safe to show. The log is given in parts, in the order of the file.

    A part of the log may end in the middle of a line or of a character.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line_length = 0  # number of characters that the last line has so far

    def clean_part(self, log_part: bytes) -> str:
        """The text to show for the next part of the log. In this text, a carriage return of the log starts a new line.

        A terminal would otherwise overwrite text that it has already shown.
        """
        shown_lines = []
        for line_index, line in enumerate(replace_invisible(self._decoder.decode(log_part)).split("\n")):
            if line_index:
                shown_lines.append("\n")
                self._line_length = 0
            chars_left = max(LONGEST_LINE - self._line_length, 0)
            shown_lines.append(line[:chars_left])
            self._line_length += len(line)
            if self._line_length > LONGEST_LINE and self._line_length - len(line) <= LONGEST_LINE:
                shown_lines.append(" ... (the log file has the rest of this line)")
        return "".join(shown_lines)


def replace_invisible(text: str) -> str:
    """The text cleaned in the same way as by `clean`, except that long lines are not cut."""
    text = _LINE_END.sub("\n", _CONTROL_SEQUENCE.sub("", text)).expandtabs()
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else _replace_char(char) for char in text)


def _replace_char(character: str) -> str:
    return " " if unicodedata.category(character) == "Zs" else REPLACEMENT_CHARACTER


def _shorten_line(line: str) -> str:
    return f"{line[:LONGEST_LINE]} ... ({len(line) - LONGEST_LINE:,} more characters)"


def _make_json_escape(character: str) -> str:
    """The JSON escape of a character, such as \\u202e. A character above U+FFFF gets two escapes (a surrogate pair)."""
    hex_digits = character.encode("utf-16-be").hex()
    return "".join(f"\\u{hex_digits[digit_index : digit_index + 4]}" for digit_index in range(0, len(hex_digits), 4))
