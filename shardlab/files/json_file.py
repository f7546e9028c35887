"""Reads a file that contains one JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS, get_decoder

T = TypeVar("T")


def read_json(json_path: Path, target_type: type[T], fault_template: str) -> T | None:
    """The content of a file as a value of the type `target_type`; None if the file does not exist.

    fault_template: the message about a file that does not fit the type, in which {} stands for the reason. Raises InputError
    with the path and this message, and WorkspaceError if the file cannot be read."""
    try:
        return get_decoder(target_type).decode(files.read(json_path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error
    except DECODE_FAULTS as error:
        raise InputError(f"{json_path}: {fault_template.format(error)}") from None


def decode_standard_input(json_bytes: bytes, target_type: type[T], expected_content: str) -> T:
    """The value of a document that another machine sent. expected_content: such as `a request`. Raises InputError."""
    try:
        return get_decoder(target_type).decode(json_bytes)
    except DECODE_FAULTS as error:
        raise InputError(f"standard input: is not {expected_content}: {error}.") from None


def read_json_if_valid(json_path: Path, target_type: type[T]) -> T | None:
    """As `read_json`, but also None if the file cannot be read or does not fit the type, for files that commands can do
    without."""
    try:
        return get_decoder(target_type).decode(files.read(json_path))
    except (OSError, *DECODE_FAULTS):
        return None
