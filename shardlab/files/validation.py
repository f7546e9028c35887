"""Checks the content of a YAML file against a type. Each problem is reported with its place and what is allowed."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from shardlab.files.document import Document, KeyPath, Problem
from shardlab.url import remove_secrets

T = TypeVar("T", bound=msgspec.Struct)


def convert_document(document: Document, target_type: type[T], *, path: KeyPath = ()) -> T:
    """Convert the content of a document to the type `target_type`. path: convert only the part with this path; (): the whole
    content.

    Raises an InputError that lists every problem with file:line:column.
    """
    data = document.data
    for part in path:
        data = data[part]
    problems: list[Problem] = []
    check_value(document, data, target_type, path, problems)
    if problems:
        raise document.errors(problems)
    return msgspec.convert(data, target_type)


def check_value(document: Document, data: Any, target_type: Any, path: KeyPath, problems: list[Problem]) -> None:
    """Check `data`, the part of the document with this path, against the type `target_type`. Appends every problem to
    `problems`."""
    target_type = _unwrap_union(target_type, data)
    if _is_struct(target_type):
        _check_struct(document, data, target_type, path, problems)
    elif get_origin(target_type) is list and isinstance(data, list):
        for index, item in enumerate(data):
            check_value(document, item, get_args(target_type)[0], (*path, index), problems)
    elif get_origin(target_type) is dict and isinstance(data, dict):
        for key, item in data.items():
            check_value(document, item, get_args(target_type)[1], (*path, key), problems)
    else:
        try:
            msgspec.convert(data, target_type, strict=True)
        except msgspec.ValidationError as error:
            detail = str(error).split(" - at ")[0]
            problems.append(document.problem(path, _mismatch_sentence(data, target_type, detail)))


def _check_struct(
    document: Document, data: Any, target_type: type[msgspec.Struct], path: KeyPath, problems: list[Problem]
) -> None:
    if not isinstance(data, dict):
        problems.append(document.problem(path, f"expected a mapping, found {describe_value(data)}."))
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(target_type)}
    for key, value in data.items():
        if key not in fields:
            similar_keys = difflib.get_close_matches(key, fields, n=1)
            hint = f" Did you mean {similar_keys[0]!r}?" if similar_keys else ""
            sentence = f"unknown key.{hint} Allowed here: {', '.join(sorted(fields))}."
            problems.append(document.problem((*path, key), sentence, at_key=True))
        else:
            check_value(document, value, fields[key].type, (*path, key), problems)
    for name, field in fields.items():
        if field.required and name not in data:
            problems.append(document.problem(path, f"the key {name!r} is missing."))


def _unwrap_union(target_type: Any, data: Any) -> Any:
    """If `target_type` is a union of types, the type in the union that the user meant, so that errors mention only this type.

    None is removed from the union. If the union has a mapping and its short form, such as text, the mapping is meant if `data`
    is a mapping.
    """
    if get_origin(target_type) in (Union, types.UnionType):
        members = [member for member in get_args(target_type) if member is not type(None)]
        if len(members) > 1:  # the union has a mapping and its short form
            members = [member for member in members if isinstance(data, dict) == _is_struct(member)]
        if data is not None and len(members) == 1:
            return _unwrap_union(members[0], data)
    return target_type


def _is_struct(target_type: Any) -> bool:
    return isinstance(target_type, type) and issubclass(target_type, msgspec.Struct)


def _mismatch_sentence(data: Any, target_type: Any, detail: str) -> str:
    """The message for a value that does not match the type `target_type`: what was found, and what is allowed.

    detail: the error message of msgspec.
    """
    plain_type = get_args(target_type)[0] if get_origin(target_type) is typing.Annotated else target_type
    if get_origin(plain_type) is Literal:
        allowed = ", ".join(str(choice) for choice in get_args(plain_type))
        return f"found {describe_value(data)}. Allowed: {allowed}."
    if plain_type is str and isinstance(data, int | float) and not isinstance(data, bool):
        return f'expected text, found {describe_value(data)}; write it in quotes, as YAML drops digits ("3.10" becomes 3.1).'
    members = get_args(target_type) if get_origin(target_type) in (Union, types.UnionType) else (target_type,)
    metas = [meta for member in members for meta in getattr(member, "__metadata__", ()) if isinstance(data, str)]
    if (words := next((meta.extra["allowed"] for meta in metas if meta.extra), None)) is not None:
        return f"found {describe_value(data)}. Allowed: {words}."
    detail = detail[0].lower() + detail[1:] if detail else "is not allowed"
    return f"found {describe_value(data)}: {detail}."


def describe_value(data: Any) -> str:
    """A value in words for a message, shortened to one line."""
    names = {bool: "the truth value", int: "the number", float: "the number", str: "the text"}
    if data is None:
        return "nothing"
    if isinstance(data, dict):
        return "a mapping"
    if isinstance(data, list):
        return "a list"
    text = str(data).lower() if isinstance(data, bool) else repr(remove_secrets(data) if isinstance(data, str) else data)
    return f"{names[type(data)]} {text[:60]}"
