"""Checks the content of a YAML file against a type. Each problem is reported with its place and what is allowed."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from shardlab.files.document import Document, Path_, Problem
from shardlab.url import without_secrets

T = TypeVar("T", bound=msgspec.Struct)


def convert(document: Document, shape: type[T], *, at: Path_ = ()) -> T:
    """Convert the content of a document to the type `shape`. at: convert only the part with this path; (): the whole content.

    Raises an InputError that lists every problem with file:line:column.
    """
    data = document.data
    for part in at:
        data = data[part]
    problems: list[Problem] = []
    check(document, data, shape, at, problems)
    if problems:
        raise document.errors(problems)
    return msgspec.convert(data, shape)


def check(document: Document, data: Any, shape: Any, path: Path_, problems: list[Problem]) -> None:
    """Check `data`, the part of the document with this path, against the type `shape`. Appends every problem to `problems`."""
    shape = _unwrap(shape, data)
    if _is_struct(shape):
        _check_struct(document, data, shape, path, problems)
    elif get_origin(shape) is list and isinstance(data, list):
        for index, item in enumerate(data):
            check(document, item, get_args(shape)[0], (*path, index), problems)
    elif get_origin(shape) is dict and isinstance(data, dict):
        for key, item in data.items():
            check(document, item, get_args(shape)[1], (*path, key), problems)
    else:
        try:
            msgspec.convert(data, shape, strict=True)
        except msgspec.ValidationError as error:
            detail = str(error).split(" - at ")[0]
            problems.append(document.problem(path, _sentence(data, shape, detail)))


def _check_struct(document: Document, data: Any, shape: type[msgspec.Struct], path: Path_, problems: list[Problem]) -> None:
    if not isinstance(data, dict):
        problems.append(document.problem(path, f"expected a mapping, found {describe(data)}."))
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(shape)}
    for key, value in data.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            sentence = f"unknown key.{hint} Allowed here: {', '.join(sorted(fields))}."
            problems.append(document.problem((*path, key), sentence, at_key=True))
        else:
            check(document, value, fields[key].type, (*path, key), problems)
    for name, field in fields.items():
        if field.required and name not in data:
            problems.append(document.problem(path, f"the key {name!r} is missing."))


def _unwrap(shape: Any, data: Any) -> Any:
    """If `shape` is a union of types, the type in the union that the user meant, so that errors mention only this type.

    None is removed from the union. If the union has a mapping and its short form, such as text, the mapping is meant if `data`
    is a mapping.
    """
    if get_origin(shape) in (Union, types.UnionType):
        members = [m for m in get_args(shape) if m is not type(None)]
        if len(members) > 1:  # the union has a mapping and its short form
            members = [m for m in members if isinstance(data, dict) == _is_struct(m)]
        if data is not None and len(members) == 1:
            return _unwrap(members[0], data)
    return shape


def _is_struct(shape: Any) -> bool:
    return isinstance(shape, type) and issubclass(shape, msgspec.Struct)


def _sentence(data: Any, shape: Any, detail: str) -> str:
    """The message for a value that does not match the type `shape`: what was found, and what is allowed.

    detail: the error message of msgspec.
    """
    bare = get_args(shape)[0] if get_origin(shape) is typing.Annotated else shape
    if get_origin(bare) is Literal:
        allowed = ", ".join(str(choice) for choice in get_args(bare))
        return f"found {describe(data)}. Allowed: {allowed}."
    if bare is str and isinstance(data, int | float) and not isinstance(data, bool):
        return f'expected text, found {describe(data)}; write it in quotes, as YAML drops digits ("3.10" becomes 3.1).'
    detail = detail[0].lower() + detail[1:] if detail else "is not allowed"
    return f"found {describe(data)}: {detail}."


def describe(data: Any) -> str:
    """A value in words for a message, shortened to one line."""
    names = {bool: "the truth value", int: "the number", float: "the number", str: "the text"}
    if data is None:
        return "nothing"
    if isinstance(data, dict):
        return "a mapping"
    if isinstance(data, list):
        return "a list"
    text = str(data).lower() if isinstance(data, bool) else repr(without_secrets(data) if isinstance(data, str) else data)
    return f"{names[type(data)]} {text[:60]}"
