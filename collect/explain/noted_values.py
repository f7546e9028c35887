"""Values of JSON files that note which of their keys are read, so that the keys behind a number are known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, cast

import msgspec

KeyPath = tuple[str | int, ...]  # keys of JSON objects and indexes of JSON lists, from the outside to the inside
Note = Callable[[KeyPath], None]
_NOTING = "_noting"
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class NotedDict(dict[str, Any]):
    """A mapping that notes the keys that are looked up. A loop over all entries notes nothing, because it reads the whole
    mapping, which was noted when the mapping itself was read."""

    def __init__(self, values: Mapping[str, Any], path: KeyPath, note: Note) -> None:
        super().__init__(values)
        self._path, self._note = path, note

    def __contains__(self, key: object) -> bool:
        self._note((*self._path, str(key)))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(path := (*self._path, key))
        return wrap(super().__getitem__(key), self._note, path)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` if the mapping does not have the key. Both cases note the key."""
        is_present = key in self
        return self[key] if is_present else default


def wrap(value: Any, note: Note, path: KeyPath = ()) -> Any:
    """A value that behaves like `value` and calls `note` with the path of each key that is read.

    value: what was decoded from JSON: a struct, a mapping, a list of them, or a plain value, which is returned unchanged.
    path: the path of the value itself in its file.
    """
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        wrapped = _make_noting_class(type(value))(**fields)
        wrapped.__dict__[_NOTING] = (path, note)
        return wrapped
    if isinstance(value, dict):
        return NotedDict(value, path, note)
    if isinstance(value, list) and any(isinstance(item, msgspec.Struct) for item in value):
        return [wrap(item, note, (*path, index)) for index, item in enumerate(value)]
    return value


@cache
def _make_noting_class(kind: type[msgspec.Struct]) -> Any:
    """A subclass of a struct type whose instances note the fields that are read. An instance without a note, such as a changed
    copy, is like an instance of `kind`."""
    names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))

    def read(self: msgspec.Struct, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        noting = kind.__getattribute__(self, "__dict__").get(_NOTING) if name in names else None
        if noting is None:
            return value
        (path, note), key = noting, names[name]
        note((*path, key))
        return wrap(value, note, (*path, key))

    return cast(Any, type(kind))(f"Noted{kind.__name__}", (kind,), {"__getattribute__": read}, dict=True)


def select_innermost(paths: Iterable[KeyPath]) -> list[KeyPath]:
    """The paths that no other path continues, sorted: of `a`, `a.b` and `c`, the paths `a.b` and `c`."""
    distinct = set(paths)
    continued = {path[:length] for path in distinct for length in range(len(path))}
    return sorted(distinct - continued, key=lambda path: [str(part) for part in path])


def find_value(document: Any, path: KeyPath) -> Any:
    """The value at a path of a JSON document; None if the document has no such key."""
    for part in path:
        try:
            document = document[part]
        except (LookupError, TypeError):
            return None
    return document


def path_text(path: KeyPath) -> str:
    """A path as text, such as `instruments.memory.peak_bytes.parameter` or `gpus[0].name`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part)}]"
    return text
