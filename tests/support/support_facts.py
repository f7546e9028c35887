"""Writes plain data as lines `name: value`, for golden files with the facts that plug-ins and constants state."""

import functools
import re

import msgspec

from tests.project.test_house import ROOT


def format_fact(value):
    """A value as text that is the same on every machine: numbers with 12 digits, sets sorted, functions by their name."""
    if isinstance(value, bool) or value is None or isinstance(value, str | bytes | int):
        return repr(value)
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, re.Pattern):
        return f"/{value.pattern}/"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(format_fact, value))) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_fact(key)}: {format_fact(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_fact, value)) + "]"
    if isinstance(value, functools.partial):
        return f"{value.func.__name__}({format_fact(value.keywords)})"
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}{format_fact(msgspec.structs.asdict(value))}"
    return getattr(value, "__name__", None) or str(value).replace(str(ROOT), "ROOT")


def describe(title, struct, left_out=()):
    """The lines of a struct: its title, then each field that is not None, empty or a function; a tuple of structs as lines."""
    fields = msgspec.structs.asdict(struct) if isinstance(struct, msgspec.Struct) else vars(struct)
    lines = [title]
    for name, value in fields.items():
        is_function = callable(value) and not isinstance(value, functools.partial)
        if name in left_out or is_function or value in (None, "", (), {}, [], frozenset()):
            continue
        if isinstance(value, tuple) and all(isinstance(entry, msgspec.Struct) for entry in value):
            lines += [f"  {name}: {format_fact(entry)}" for entry in value]
        else:
            lines.append(f"  {name}: {format_fact(value)}")
    return lines
