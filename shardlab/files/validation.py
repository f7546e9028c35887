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


def convert_document(document: Document, target_type: type[T], *, key_path: KeyPath = ()) -> T:
    """Convert the content of a document to the type `target_type`. key_path: convert only the part with this path; (): the
    whole content.

    Raises an InputError that lists every problem with file:line:column.
    """
    document_part = document.data
    for path_part in key_path:
        document_part = document_part[path_part]
    problems: list[Problem] = []
    check_value(document, document_part, target_type, key_path, problems)
    if problems:
        raise document.errors(problems)
    return msgspec.convert(document_part, target_type)


def check_value(document: Document, document_part: Any, target_type: Any, key_path: KeyPath, problems: list[Problem]) -> None:
    """Check `document_part`, the part of the document with this path, against the type `target_type`. Appends every problem to
    `problems`."""
    target_type = _unwrap_union(target_type, document_part)
    if _is_struct(target_type):
        _check_struct(document, document_part, target_type, key_path, problems)
    elif get_origin(target_type) is list and isinstance(document_part, list):
        for index, child_value in enumerate(document_part):
            check_value(document, child_value, get_args(target_type)[0], (*key_path, index), problems)
    elif get_origin(target_type) is dict and isinstance(document_part, dict):
        for key, child_value in document_part.items():
            check_value(document, key, get_args(target_type)[0], (*key_path, key), problems)
            check_value(document, child_value, get_args(target_type)[1], (*key_path, key), problems)
    else:
        try:
            msgspec.convert(document_part, target_type, strict=True)
        except msgspec.ValidationError as error:
            error_text = str(error).split(" - at ")[0]
            problems.append(document.problem(key_path, _describe_mismatch(document_part, target_type, error_text)))


def _check_struct(
    document: Document, document_part: Any, target_type: type[msgspec.Struct], key_path: KeyPath, problems: list[Problem]
) -> None:
    if not isinstance(document_part, dict):
        problems.append(document.problem(key_path, f"expected a mapping, found {describe_value(document_part)}."))
        return
    field_by_name = {field.encode_name: field for field in msgspec.structs.fields(target_type)}
    for key, value in document_part.items():
        if key not in field_by_name:
            similar_keys = difflib.get_close_matches(key, field_by_name, n=1)
            suggestion = f" Did you mean {similar_keys[0]!r}?" if similar_keys else ""
            sentence = f"unknown key.{suggestion} Allowed here: {', '.join(sorted(field_by_name))}."
            problems.append(document.problem((*key_path, key), sentence, at_key=True))
        else:
            check_value(document, value, field_by_name[key].type, (*key_path, key), problems)
    for field_name, field in field_by_name.items():
        if field.required and field_name not in document_part:
            problems.append(document.problem(key_path, f"the key {field_name!r} is missing."))


def _unwrap_union(target_type: Any, document_part: Any) -> Any:
    """If `target_type` is a union of types, the type in the union that the user meant, so that errors mention only this type.

    None is removed from the union. If the union has a mapping and its short form, such as text, the mapping is meant if
    `document_part` is a mapping."""
    if get_origin(target_type) in (Union, types.UnionType):
        union_types = [member for member in get_args(target_type) if member is not type(None)]
        if len(union_types) > 1:  # the union has a mapping and its short form
            union_types = [member for member in union_types if isinstance(document_part, dict) == _is_struct(member)]
        if document_part is not None and len(union_types) == 1:
            return _unwrap_union(union_types[0], document_part)
    return target_type


def _is_struct(target_type: Any) -> bool:
    return isinstance(target_type, type) and issubclass(target_type, msgspec.Struct)


def _describe_mismatch(value: Any, target_type: Any, error_text: str) -> str:
    """The message for a value that does not match the type `target_type`: what was found, and what is allowed.

    error_text: the error message of msgspec.
    """
    plain_type = get_args(target_type)[0] if get_origin(target_type) is typing.Annotated else target_type
    if get_origin(plain_type) is Literal:
        allowed_choices = ", ".join(str(choice) for choice in get_args(plain_type))
        return f"found {describe_value(value)}. Allowed: {allowed_choices}."
    if plain_type is str and isinstance(value, int | float) and not isinstance(value, bool):
        return f'expected text, found {describe_value(value)}; write it in quotes, as YAML drops digits ("3.10" becomes 3.1).'
    union_types = get_args(target_type) if get_origin(target_type) in (Union, types.UnionType) else (target_type,)
    annotations = [meta for member in union_types for meta in getattr(member, "__metadata__", ()) if isinstance(value, str)]
    if (allowed_text := next((meta.extra["allowed"] for meta in annotations if meta.extra), None)) is not None:
        return f"found {describe_value(value)}. Allowed: {allowed_text}."
    error_text = error_text[0].lower() + error_text[1:] if error_text else "is not allowed"
    return f"found {describe_value(value)}: {error_text}."


def describe_value(data: Any) -> str:
    """A value in words for a message, shortened to one line."""
    kind_names = {bool: "the truth value", int: "the number", float: "the number", str: "the text"}
    if data is None:
        return "nothing"
    if isinstance(data, dict):
        return "a mapping"
    if isinstance(data, list):
        return "a list"
    value_text = str(data).lower() if isinstance(data, bool) else repr(remove_secrets(data) if isinstance(data, str) else data)
    return f"{kind_names[type(data)]} {value_text[:60]}"
