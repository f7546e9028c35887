"""Reads YAML strictly: no value is silently changed, and the line and column of every value are kept.

YAML 1.1 turns ``1:30:00`` into 5400, ``3.10`` into 3.1 and ``on`` into true, uses the last of two equal keys, and expands
aliases without limit. This reader accepts only null, true, false, decimal integers, decimal floats and text as plain scalars.
It refuses an ambiguous value with an error that names the place and the allowed spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files

MAX_BYTES = 4 * 1024 * 1024  # the largest file that is read; a larger matrix file or cluster file is a mistake or an attack
MAX_DEPTH = 32  # the largest number of levels of nested mappings and lists

_INT_PATTERN = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_FLOAT_PATTERN = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_TIME_PATTERN = re.compile(r"[-+]?[0-9]+(:[0-9]{1,2})+(\.[0-9]*)?\Z")
# Text that some YAML parsers read as an octal, hexadecimal or binary number, as a number with underscores, as infinity or as
# NaN. A checksum such as 0a1f does not match.
_ODD_NUMBER_PATTERN = re.compile(
    r"[-+]?(0o?[0-7_]+|0x[0-9a-fA-F_]+|0b[01_]+|0[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*_[0-9_]*|\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
)
_ODD_BOOL_WORDS = {"yes", "no", "on", "off", "y", "n"}

KeyPath = tuple[str | int, ...]


class Position(msgspec.Struct, frozen=True):
    """A place in a file."""

    line: int
    """Counted from 1."""
    column: int
    """Counted from 1."""


class Problem(msgspec.Struct, frozen=True):
    """A problem in a file."""

    mark: Position
    """The place of the problem in the file."""
    key_text: str
    """The dotted path of the key."""
    sentence: str
    """The message to the user."""
    option: str = ""
    """The option of the command line that gave the value; "": the value stands in the file."""


class Document(msgspec.Struct):
    """The content of a YAML file, and the place of every value and of every key in the file."""

    file: str
    """The name of the file for error messages."""
    data: Any = None
    """The content as dicts, lists, text and numbers."""
    position_by_value_path: dict[KeyPath, Position] = {}
    """The place of each value in the file, by the path of the value in `data`."""
    position_by_key_path: dict[KeyPath, Position] = {}
    """The place of each key in the file, by the path in `data` of the value of this key."""
    option_by_path: dict[KeyPath, str] = {}
    """The option of the command line that gave the value, such as `--set steps=5`, by the path of the value in `data`. All
    other values stand in the file."""

    def problem(self, key_path: KeyPath, sentence: str, *, at_key: bool = False) -> Problem:
        """A problem at the place of the value with this path, or of the nearest value around it that the file contains.

        key_path: the path of the value in `data`. sentence: the message. at_key: use the place of the key, not of its value.
        """
        positions = self.position_by_key_path if at_key else self.position_by_value_path
        nearest_path = key_path
        while nearest_path and nearest_path not in positions and nearest_path not in self.position_by_value_path:
            nearest_path = nearest_path[:-1]
        position = positions.get(nearest_path) or self.position_by_value_path.get(nearest_path) or Position(1, 1)
        option = next((option for path, option in self.option_by_path.items() if key_path[: len(path)] == path), "")
        return Problem(position, format_path(key_path), sentence, option)

    def error(self, key_path: KeyPath, sentence: str, *, at_key: bool = False) -> InputError:
        """An exception for one problem, which the caller raises. The arguments are the same as for `problem`."""
        return self.errors([self.problem(key_path, sentence, at_key=at_key)])

    def errors(self, problems: list[Problem]) -> InputError:
        """One exception for several problems, which the caller raises. Its message has one line for each problem.

        The lines are in the order of the places of the problems in the file.
        """
        ordered_problems = sorted(problems, key=lambda p: (p.mark.line, p.mark.column))
        problem_lines = [
            f"{p.option or f'{self.file}:{p.mark.line}:{p.mark.column}'}: {p.key_text + ': ' if p.key_text else ''}{p.sentence}"
            for p in ordered_problems
        ]
        return InputError("\n".join(dict.fromkeys(problem_lines)))


def format_path(key_path: KeyPath) -> str:
    """A path as text: ``nodes[0].host`` for ``("nodes", 0, "host")``."""
    path_text = ""
    for path_part in key_path:
        path_text += f"[{path_part}]" if isinstance(path_part, int) else f".{path_part}" if path_text else path_part
    return path_text


def load_document(path: Path) -> Document:
    """Read the file `path`. Raises InputError for a missing file and for everything that is not plain, unambiguous YAML."""
    try:
        yaml_bytes = files.read(path, MAX_BYTES, follow_links=True)
    except files.TooLarge:
        limit_text = f"{MAX_BYTES // 2**20} MiB, the limit for a cluster file or a matrix file"
        raise InputError(f"{path}: larger than {limit_text}.") from None
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except files.NotRegular as error:
        raise InputError(f"{path}: is {error.kind}, not a file.") from None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error
    return parse_document(yaml_bytes, str(path))


def _explain_shape(yaml_text: str, error: yaml.MarkedYAMLError) -> str:
    """What is wrong with the shape of a YAML text: in words about its lines, where the words of the parser do not help."""
    problem, begin_mark = error.problem or error.context or "cannot be read", error.context_mark
    if error.problem_mark is None:
        return problem
    lines, line_index = re.split(r"\r\n|[\n\r\x85\u2028\u2029]", yaml_text), error.problem_mark.line  # as YAML counts lines
    upper_index = max((index for index in range(line_index) if lines[index].strip()), default=line_index)
    line_indent, upper_indent = (len(line) - len(line.lstrip(" ")) for line in (lines[line_index], lines[upper_index]))
    if r"'\t'" in problem:
        return "a tab. Allowed: spaces, for example 2 for each level"
    is_mapping_problem = problem.startswith("mapping values")
    if problem == "could not find expected ':'" or (is_mapping_problem and ":" not in lines[upper_index]):
        return f"line {upper_index + 1}, {lines[upper_index].strip()!r}, has no colon. Allowed: `key: value`"
    if line_indent != upper_indent and (is_mapping_problem or problem.startswith("expected <block end>")):
        block_clause = ""
        if begin_mark is not None and begin_mark.column not in (line_indent, upper_indent):
            block_clause = f", the block that begins in line {begin_mark.line + 1} by {begin_mark.column}"
        sentence = f"line {line_index + 1} is indented by {line_indent}, the line above by {upper_indent}{block_clause}"
        return f"{sentence}. Allowed: the same indentation for all keys of a block"
    return f"{problem}. Allowed: quotes around a text that contains `: `" if is_mapping_problem else problem


def parse_document(yaml_bytes: bytes, file_name: str) -> Document:
    """Parse one YAML document. yaml_bytes: its bytes. file_name: the name of the file for error messages. Raises InputError."""
    document = Document(file_name)
    try:
        yaml_text = yaml_bytes.decode("utf-8")
    except UnicodeDecodeError as error:
        line_number = yaml_bytes[: error.start].count(b"\n") + 1
        raise InputError(f"{file_name}:{line_number}:1: byte {error.start} is not UTF-8 text.") from None
    try:
        # The loader in pure Python is used, because the loader in C does not count columns in characters. The pure-Python
        # loader is slow, but matrix files and cluster files are small.
        document.data = _DocumentBuilder(document, yaml.parse(yaml_text, Loader=yaml.SafeLoader)).build()
    except yaml.MarkedYAMLError as error:
        error_mark = error.problem_mark or error.context_mark
        error_position = f"{error_mark.line + 1}:{error_mark.column + 1}" if error_mark else "1:1"
        raise InputError(f"{file_name}:{error_position}: not valid YAML: {_explain_shape(yaml_text, error)}.") from None
    except yaml.reader.ReaderError as error:
        line_number = yaml_text[: error.position].count("\n") + 1
        raise InputError(f"{file_name}:{line_number}:1: not valid YAML: {error.reason}.") from None
    return document


class _DocumentBuilder:
    """Builds dicts, lists, text and numbers from the events of the YAML parser. It refuses aliases, anchors and tags."""

    def __init__(self, document: Document, events: Iterator[yaml.Event]) -> None:
        self.document = document
        self.events = events

    def build(self) -> Any:
        content: Any = None
        has_document = False
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if has_document:
                    raise self.error_at(event, (), "found a second document in this file. Allowed: one document per file")
                has_document = True
            elif isinstance(event, yaml.NodeEvent):
                content = self.build_node(event, ())
        return content

    def error_at(self, event: yaml.Event, parent_path: KeyPath, sentence: str) -> InputError:
        return self.document.errors([Problem(_find_event_position(event), format_path(parent_path), sentence + ".")])

    def build_node(self, event: yaml.Event, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:
            raise self.error_at(event, path[:3], f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            raise self.error_at(event, path, f"found an alias (*{event.anchor}). Allowed: the value itself")
        if anchor := getattr(event, "anchor", None):
            raise self.error_at(event, path, f"found an anchor (&{anchor}). Allowed: the value at each place that needs it")
        if tag := getattr(event, "tag", None):
            raise self.error_at(event, path, f"found a tag ({tag}). Allowed: only values without a tag")
        self.document.position_by_value_path[path] = _find_event_position(event)
        if isinstance(event, yaml.ScalarEvent):
            return self.build_scalar(event, path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.build_list(path)
        assert isinstance(event, yaml.MappingStartEvent)
        return self.build_mapping(path)

    def build_list(self, list_path: KeyPath) -> list[Any]:
        list_values: list[Any] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            list_values.append(self.build_node(event, (*list_path, len(list_values))))
        return list_values

    def build_mapping(self, mapping_path: KeyPath) -> dict[str, Any]:
        value_by_key: dict[str, Any] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent):
                raise self.error_at(event, mapping_path, "found a key that is not plain text. Allowed: text as a key")
            if event.anchor or event.tag:
                raise self.error_at(event, mapping_path, "found an anchor or a tag on a key. Allowed: only the key")
            key_name = event.value
            key_path = (*mapping_path, key_name)
            if key_name == "<<" and not event.style:
                raise self.error_at(event, mapping_path, "found a merge key (<<). Allowed: the keys themselves")
            if key_name in value_by_key:
                first_position = self.document.position_by_key_path[key_path]
                first_place = f"first at {first_position.line}:{first_position.column}"
                raise self.error_at(event, key_path, f"found this key twice, {first_place}. Allowed: each key once")
            self.document.position_by_key_path[key_path] = _find_event_position(event)
            value_by_key[key_name] = self.build_node(next(self.events), key_path)
        return value_by_key

    def build_scalar(self, event: yaml.ScalarEvent, path: KeyPath) -> Any:
        value = event.value
        if event.style:
            return value
        if value in ("", "~", "null"):
            return None
        if value in ("true", "false"):
            return value == "true"
        if _INT_PATTERN.match(value):
            return int(value)
        if _FLOAT_PATTERN.match(value) and not re.match(r"[-+]?0[0-9]", value):
            return float(value)
        if _TIME_PATTERN.match(value):
            sentence = (
                f'found {value} without quotes, which some YAML parsers read as a number. Allowed: a number, or "{value}"'
            )
            raise self.error_at(event, path, f"{sentence} if it is a time")
        if _ODD_NUMBER_PATTERN.match(value):
            raise self.error_at(
                event, path, f'{value} is read differently by different YAML parsers; write a plain decimal or "{value}"'
            )
        if value.lower() in _ODD_BOOL_WORDS:
            raise self.error_at(event, path, f'{value} is true or false to some YAML parsers; write true, false or "{value}"')
        return value


def _find_event_position(event: yaml.Event) -> Position:
    assert event.start_mark is not None  # the pure-Python parser always sets start_mark
    return Position(event.start_mark.line + 1, event.start_mark.column + 1)
