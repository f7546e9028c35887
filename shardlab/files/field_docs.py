"""Reads the docstring under each field of a type. The JSON Schemas of shardlab describe keys of files with these docstrings.

Python does not keep docstrings of fields at run time, so they are read from the source of the class.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

import msgspec
from msgspec import inspect as types


def read_field_docs(struct_type: type[msgspec.Struct]) -> dict[str, str]:
    """For each field of a struct that has a docstring: the name of the field in a file -> the docstring as one line.

    If a subclass documents a field of its base class again, the docstring in the subclass is used.

    Raises OSError if the source of the class cannot be read.
    """
    doc_by_field: dict[str, str] = {}
    for base_class in reversed(struct_type.__mro__):
        if issubclass(base_class, msgspec.Struct) and base_class is not msgspec.Struct:
            (class_definition,) = ast.parse(textwrap.dedent(inspect.getsource(base_class))).body
            assert isinstance(class_definition, ast.ClassDef)
            doc_by_field |= dict(_list_documented_fields(class_definition))
    encoded_name_by_field = {field.name: field.encode_name for field in msgspec.structs.fields(struct_type)}
    return {encoded_name_by_field[field_name]: field_doc for field_name, field_doc in doc_by_field.items()}


def _list_documented_fields(class_definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yields (name of the field, its docstring) for each field that has a docstring below it in the source of a class."""
    for field, next_statement in zip(class_definition.body, class_definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(next_statement, ast.Expr):
            docstring_node = next_statement.value
            if isinstance(docstring_node, ast.Constant) and isinstance(docstring_node.value, str):
                yield field.target.id, " ".join(docstring_node.value.split())


def join_lines(docstring: str) -> str:
    """A docstring with each paragraph as one line: the same text on each Python, of which 3.13 removes the indentation."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", docstring.strip()))


def map_nested_structs(root_type: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The struct type `root_type` and all struct types that its fields contain, at any depth, by the names of the types."""
    structs_by_name: dict[str, type[msgspec.Struct]] = {}
    unvisited_types: list[types.Type] = [types.type_info(root_type)]
    while unvisited_types:
        field_type = unvisited_types.pop()
        if isinstance(field_type, types.StructType):
            if field_type.cls.__name__ in structs_by_name:
                continue
            structs_by_name[field_type.cls.__name__] = field_type.cls
            unvisited_types += [field.type for field in field_type.fields]
        elif isinstance(field_type, types.UnionType):
            unvisited_types += field_type.types
        elif isinstance(field_type, types.ListType):
            unvisited_types.append(field_type.item_type)
        elif isinstance(field_type, types.DictType):
            unvisited_types += [field_type.key_type, field_type.value_type]
        elif isinstance(field_type, types.Metadata):
            unvisited_types.append(field_type.type)
    return structs_by_name
