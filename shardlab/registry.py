"""A file in a folder is a plug-in; a family file lists its variants; an unknown name prints the menu."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

import msgspec

from shardlab.errors import UnknownName


class Option(msgspec.Struct, frozen=True):
    """A knob under a cell's `options:`; its default is written into every run.json."""

    name: str
    default: bool | int | float | str | None
    summary: str
    choices: tuple[bool | int | float | str, ...] = ()

    def refuse(self, value: bool | int | float | str | None) -> str | None:
        """Why `value` cannot be had, as a sentence, or None."""
        if self.choices:
            allowed = ", ".join(str(choice) for choice in self.choices)
            return None if value in self.choices else f"found {value!r}. Allowed: {allowed}."
        if value is None or self.default is None:
            return None
        wanted = type(self.default)
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        return None if fits else f"found {value!r}. Allowed: a value like {self.default!r}."


@functools.cache
def modules(package: str) -> tuple[str, ...]:
    """The names of the plug-in files in a package's folder."""
    folder = importlib.import_module(package)
    return tuple(sorted(entry.name for entry in pkgutil.iter_modules(folder.__path__) if not entry.name.startswith("_")))


@functools.cache
def load(package: str, name: str, kind: str) -> ModuleType:
    """The plug-in file `name`. Raises UnknownName with the menu."""
    menu = modules(package)
    if name not in menu:
        raise UnknownName(kind, name, menu)
    return importlib.import_module(f"{package}.{name}")


@functools.cache
def load_all(package: str) -> tuple[ModuleType, ...]:
    """Every plug-in file of a package, by name."""
    return tuple(importlib.import_module(f"{package}.{name}") for name in modules(package))
