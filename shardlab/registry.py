"""Finds and loads the plug-ins of shardlab, such as strategies, and defines the options that plug-ins have.

Plug-ins of one kind are the Python files in the folder of one package. Each file is a plug-in, or a family that contains
several plug-ins.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

import msgspec

from shardlab.errors import UnknownName

OptionValue = bool | int | float | str | None
OptionKind = Literal["bool", "int", "float", "str"]
V = TypeVar("V", bound=OptionValue)
_KIND_WORDS = {"bool": "true, false", "int": "a whole number", "float": "a number", "str": "text"}


class Option(msgspec.Struct, frozen=True):
    """An option of a strategy or workload, which a matrix file sets under `options`. Every run.json contains its value.

    Rules that depend on other keys of a cell are checked by the strategy or the workload.
    """

    name: str
    """The key below `options`."""
    default: OptionValue
    """The value if the matrix file does not set the option."""
    summary: str
    """The meaning of the option, for the help."""
    choices: tuple[bool | int | float | str, ...] = ()
    """The allowed values, if they can be listed."""
    kind: OptionKind | None = None
    """The type of a value; needed only if the default is null."""
    least: float | None = None
    """The smallest allowed number."""
    most: float | None = None
    """The largest allowed number."""
    nullable: bool = False
    """Whether null is allowed."""

    def __post_init__(self) -> None:
        if self.default is None and not (self.nullable and (self.kind or self.choices)):
            raise ValueError(f"option {self.name}: a default of null needs nullable=True and a kind")
        if (refusal := self.explain_refused_value(self.default)) is not None:
            raise ValueError(f"option {self.name}: the default is not allowed: {refusal}")

    def explain_refused_value(self, value: OptionValue) -> str | None:
        """Why `value` is not allowed, as a sentence; None if it is allowed."""
        return None if self._allows(value) else f"found {_format_value(value)}. Allowed: {self.allowed}."

    def replace_default(self, default: OptionValue) -> Option:
        """A copy of this option with another default. Raises ValueError if the option does not allow this default."""
        return msgspec.structs.replace(self, default=default)

    @property
    def allowed(self) -> str:
        """The allowed values in words: `a whole number from 1 to 64, or null`."""
        allowed_text = ", ".join(map(_format_value, self.choices)) or _KIND_WORDS[self._kind]
        if self.least is not None:
            allowed_text += f" from {self.least:,g}" if self._kind == "float" else f" from {int(self.least)}"
        if self.most is not None:
            allowed_text += f" {'up ' if self.least is None else ''}to {self.most if self._kind == 'float' else int(self.most)}"
        return f"{allowed_text}, or null" if self.nullable else allowed_text

    @property
    def _kind(self) -> OptionKind:
        return self.kind or cast("OptionKind", type(self.default).__name__)

    def _allows(self, value: OptionValue) -> bool:
        if value is None:
            return self.nullable
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)  # types too: 1 equals True
        if type(value).__name__ != self._kind and not (self._kind == "float" and type(value) is int):
            return False
        if isinstance(value, str):
            return True
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


class TypedOptions:
    """The values of options in a cell, as attributes with types. A subclass declares the options of a strategy or workload, and
    its menu entry lists them: `join: bool = declare(False, "SUMMARY")` declares the option `join`."""

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        """options: the options of a resolved cell. An option that the cell lacks has its default."""
        for option in self.list_options():
            setattr(self, option.name, options.get(option.name, option.default))

    @classmethod
    @functools.cache
    def list_options(cls) -> tuple[Option, ...]:
        """The declared options, in their order."""
        options = {name: option for name, option in vars(cls).items() if isinstance(option, Option)}
        return tuple(msgspec.structs.replace(option, name=name) for name, option in options.items())


def declare(default: V, summary: str, choices: tuple[V, ...] = (), **rules: Any) -> V:
    """Declare an option in a subclass of `TypedOptions`, which gives the name. The parameters are the other fields of `Option`;
    null is allowed if it is the default. For mypy, the result has the type of the option's values."""
    return cast("V", Option("", default, summary, cast("tuple[Any, ...]", choices), nullable=default is None, **rules))


def _format_value(value: OptionValue) -> str:
    """A value as it is written in a matrix file."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, str) else repr(value)


@functools.cache
def list_plugin_names(package_name: str) -> tuple[str, ...]:
    """The names of the plug-in files of a package, sorted. Files whose names begin with `_` are left out.

    package_name: the name of the package, such as `trainers.strategies`.
    """
    package = importlib.import_module(package_name)
    return tuple(sorted(entry.name for entry in pkgutil.iter_modules(package.__path__) if not entry.name.startswith("_")))


@functools.cache
def load_plugin(package_name: str, name: str, plugin_kind: str) -> ModuleType:
    """Import the plug-in file `name` of a package. plugin_kind: what the error calls such a plug-in, for example `strategy`.

    Raises UnknownName, which lists all allowed names, if the package has no such file.
    """
    plugin_files = list_plugin_names(package_name)
    if name not in plugin_files:
        raise UnknownName(plugin_kind, name, plugin_files)
    return importlib.import_module(f"{package_name}.{name}")


@functools.cache
def load_plugins(package_name: str) -> tuple[ModuleType, ...]:
    """Import all plug-in files of a package, sorted by name."""
    return tuple(importlib.import_module(f"{package_name}.{name}") for name in list_plugin_names(package_name))
