"""The description of an export format, and writing its folder: completely or not at all. Only an earlier export is replaced."""

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
    """A run in an experiment tracker, to which points are added until it ends."""

    def log(self, points: Sequence[TrackedStep]) -> None:
        """Add points, of no earlier step than those before."""

    def end(self, run: Tracked) -> None:
        """Add what is known at the end: metrics, and keys of the configuration that are new; then close the run."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """A format on the menu.

    holds: every name that its folder may contain. write: fills a new, empty folder; the second path is the final path of this
    folder, for formats that write paths into files. extra: the optional set of packages that the format needs, or None;
    package: the package of this set that is imported. follow: for a tracker: open a run that goes on, of this experiment, in a
    folder that runs share, in place of what the folder has of this run.
    """

    name: str
    summary: str
    holds: frozenset[str]
    write: Callable[[Loaded, Summary, Path, Path], None]
    extra: str | None = None
    package: str = ""
    follow: Callable[[str, Tracked, Path], OpenRun] | None = None


def exports() -> dict[str, Export]:
    """Every format by name."""
    return {module.EXPORT.name: module.EXPORT for module in registry.load_all("collect.exports")}


def export(name: str) -> Export:
    """The format with this name. Raises UnknownName with the menu, MissingExtra if a package that it needs is not installed."""
    menu = exports()
    if name not in menu:
        raise UnknownName("export format", name, menu, summaries={name: format_.summary for name, format_ in menu.items()})
    found = menu[name]
    if found.extra and importlib.util.find_spec(found.package) is None:
        raise MissingExtra(found.extra, f"collect export --to {name}", found.package)
    return found


def package(name: str) -> ModuleType:
    """A module of an extra, by its name: imported where it is used, as no other command needs it, and without its types."""
    return importlib.import_module(name)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables, for libraries that have no other way to set an option; restore them after the block."""
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
    """Write the folder of a format, in place of an earlier export; returns the paths in it.

    Raises InputError if the folder contains anything that is not of this format, WorkspaceError if it cannot be written.
    """
    with atomic_folder.replacing(folder, format_.holds, f"a {format_.name} export") as fresh:
        format_.write(loaded, summary, fresh, folder)
    return sorted(folder / name for name in format_.holds if (folder / name).exists())
