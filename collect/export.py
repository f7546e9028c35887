"""Defines what an export format is, and writes the folder of an export.

The folder is written completely or not at all. An existing folder is replaced only if it is an earlier export.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import msgspec

from collect import atomic_folder
from collect.loading.load import Loaded
from collect.summary import Summary
from collect.tracked_run import Tracked, TrackedStep
from shardlab import registry
from shardlab.errors import MissingExtra, UnknownName


class OpenRun(Protocol):
    """A run that is open in an experiment tracker; points are added until the run ends."""

    def log(self, points: Sequence[TrackedStep]) -> None:
        """Add points. Their steps must not be earlier than the steps that were added before."""

    def end(self, run: Tracked) -> None:
        """Add the final metrics and any new keys of the configuration, then close the run."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """An export format, as `collect export --to` offers it.

    write: fills a new, empty folder. The first path is this folder; the second path is the folder's final path, for formats
    that write paths into files.

    follow: only for experiment trackers: opens a run that is still going on. Its arguments are the name of the experiment, the
    run, and a folder that several runs share. Anything that the folder already contains of this run is replaced.
    """

    name: str
    summary: str  # one line that describes the format
    holds: frozenset[str]  # every name that the folder of the export may contain
    write: Callable[[Loaded, Summary, Path, Path], None]
    extra: str | None = None  # the optional set of packages that the format needs; None: it needs no other packages
    package: str = ""  # the package of `extra` that the format imports
    follow: Callable[[str, Tracked, Path], OpenRun] | None = None


def exports() -> dict[str, Export]:
    """All export formats, by name."""
    return {module.EXPORT.name: module.EXPORT for module in registry.load_all("collect.exports")}


def export(name: str) -> Export:
    """The export format with this name.

    Raises UnknownName, with a list of all formats, if there is no format of this name, and MissingExtra if a package that the
    format needs is not installed.
    """
    menu = exports()
    if name not in menu:
        raise UnknownName("export format", name, menu, summaries={name: format_.summary for name, format_ in menu.items()})
    found = menu[name]
    if found.extra and importlib.util.find_spec(found.package) is None:
        raise MissingExtra(found.extra, f"collect export --to {name}", found.package)
    return found


def package(name: str) -> ModuleType:
    """Import a module of an optional package by its name.

    The module is imported only where it is used, because no other command needs the package; so its types are not known here.
    """
    return importlib.import_module(name)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables inside the block and restore them afterwards.

    For libraries that have no other way to set an option.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def write(format_: Export, loaded: Loaded, summary: Summary, folder: Path) -> list[Path]:
    """Write the folder of an export, or replace an earlier export in it; returns the paths of the files and folders in it.

    Raises InputError if the folder contains anything that does not belong to this format, and WorkspaceError if the folder
    cannot be written.
    """
    with atomic_folder.replacing(folder, format_.holds, f"a {format_.name} export") as fresh:
        format_.write(loaded, summary, fresh, folder)
    return sorted(folder / name for name in format_.holds if (folder / name).exists())
