"""Operators that replace the mode of a file, a power of 1000 or 1024, a unit in a text, or a text itself.

They are written like the operators of Cosmic Ray, as those of dropping.py. Docstrings and the texts of `--help`, which golden
files hold, are left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from dropping import HELP, Position, expression, position, text

OTHER_UNITS = {
    **{f"{prefix}iB": f"{'k' if prefix == 'K' else prefix}B" for prefix in "KMGT"},
    **{f"{prefix}B": f"{'K' if prefix == 'k' else prefix}iB" for prefix in "kMGT"},
    "s": "ms",
    "ms": "s",
    "us": "ms",
    "µs": "ms",
    "ns": "us",
}
# `s`, `us` and `ns` are units only after a number or an expression, or in brackets after a space; `us` and `ns` also as a whole
# text.
UNIT = re.compile(
    r"(?<![\w/.-])(?:[KMGT]iB|[kMGT]B|ms|µs)(?![\w-])"
    r"|(?:(?<= \()|(?<=\d )|(?<=\d)|(?<=^ ))(?:s|us|ns)(?![\w'-])"
    r"|^(?:us|ns)$"
)
# Two or more words in a row: the least text that is a message or a heading and not a key or an option.
WORDS = re.compile(r"(?:(?<=\\n)|(?<![\\\w%{<-]))[A-Za-z]{2,}(?: [A-Za-z]{2,})+(?!\w)")
POWERS = {base**power: (base, power) for base in (1000, 1024) for power in range(1, 6)}


class ReplaceMode:
    """Replaces the mode of a file or folder: only its owner may use it, or everybody if that is so already. A mask without bits
    of the owner keeps only the bits of the group."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.type == "number" and re.fullmatch(r"0o[0-7]{3,}", node.value) and _other_mode(int(node.value, 8)) is not None:
            yield position(node)

    def mutate(self, node: Any, index: int) -> Any:
        node.value = f"0o{_other_mode(int(node.value, 8)):03o}"
        return node


def _other_mode(mode: int) -> int | None:
    if not mode & 0o700:
        other = mode & 0o070
    elif mode & 0o077:
        other = mode & ~0o077
    else:
        other = mode | (0o055 if mode & 0o100 else 0o044)
    return other if other != mode else None


class ReplacePower:
    """Replaces a power of 1000 by the same power of 1024 and the reverse, or either by the power below or above it."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        for _ in _other_powers(node):
            yield position(node)

    def mutate(self, node: Any, index: int) -> Any:
        return expression(_other_powers(node)[index], node)


def _other_powers(node: Any) -> list[str]:
    """The numbers that can stand in the place of a node, as code; nothing if the node is no power of 1000 or 1024."""
    is_number = node.type == "number" and node.parent.type not in ("power", "shift_expr")
    if not is_number and not re.fullmatch(r"(2|1024) ?\*\* ?\d{1,2}|1 << \d{1,2}", text(node)):
        return []
    if node.type == "number" and re.fullmatch(r"1e-(3|6|9)", node.value):
        return ["1e-6" if node.value == "1e-3" else "1e-3"]
    value = _value(text(node))
    if value not in POWERS:
        return []
    base, power = POWERS[int(value)]
    other = 1000 if base == 1024 else 1024
    powers = [other**power, base ** (power - 1 if power > 1 else 2)]
    return [repr(float(number)) if isinstance(value, float) else str(number) for number in powers]


def _value(code: str) -> float | int | None:
    """The number that a literal, a power or a shift gives; None for a number that is not a real number."""
    if match := re.fullmatch(r"(\d+) ?(\*\*|<<) ?(\d+)", code):
        first, second = int(match[1]), int(match[3])
        return first**second if match[2] == "**" else first << second
    value = ast.literal_eval(code)
    return value if isinstance(value, int | float) else None


class ReplaceUnit:
    """Replaces a unit in a text by a related unit, such as `GiB` by `GB` or `ms` by `s`."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if is_shown(node):
            for _ in UNIT.finditer(content(node)):
                yield position(node)

    def mutate(self, node: Any, index: int) -> Any:
        match = list(UNIT.finditer(content(node)))[index]
        return with_replaced(node, match, OTHER_UNITS[match[0]])


class ReplaceText:
    """Replaces the first two or more words in a row of a text by `XX`. Texts with fewer words are keys, options or names.

    In an f-string, the parts between the expressions are texts of their own.
    """

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if is_shown(node) and WORDS.search(content(node)):
            yield position(node)

    def mutate(self, node: Any, index: int) -> Any:
        match = WORDS.search(content(node))
        assert match is not None
        return with_replaced(node, match, "XX")


def is_shown(node: Any) -> bool:
    """Whether a node is a text, or a part of an f-string, that is no docstring, no regular expression and no help."""
    if node.type not in ("string", "fstring_string"):
        return False
    whole = node.parent if node.type == "fstring_string" else node
    letters = re.match(r"\w*", text(whole))
    if letters is not None and set(letters[0].lower()) & {"r", "b"}:
        return False
    whole = whole.parent if whole.parent.type == "strings" else whole
    return whole.parent.type != "simple_stmt" and not _is_help(whole)


def _is_help(node: Any) -> bool:
    while node is not None and not node.type.endswith("_stmt"):
        if node.type == "argument" and text(node.children[0]) in HELP:
            return True
        node = node.parent
    return False


def content(node: Any) -> str:
    """The text between the quotation marks of a string, or a part of an f-string."""
    begin, end = _bounds(node)
    return str(node.value)[begin:end]


def _bounds(node: Any) -> tuple[int, int]:
    if node.type == "fstring_string":
        return 0, len(node.value)
    opening = re.match(r"\w*('''|\"\"\"|'|\")", node.value)
    assert opening is not None
    return opening.end(), len(node.value) - len(opening[1])


def with_replaced(node: Any, match: re.Match[str], new: str) -> Any:
    """The node with another text in the place of a match in its content."""
    begin, _ = _bounds(node)
    start, end = begin + match.start(), begin + match.end()
    node.value = node.value[:start] + new + node.value[end:]
    return node
