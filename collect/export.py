"""Defines what an export format is, and writes the folder of an export.

The folder is written completely or not at all. An existing folder is only replaced if it contains an earlier export.
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
from collect.reading.load import LoadedMatrix
from collect.summary import Summary
from collect.tracked_run import TrackedRun, TrackedStep
from shardlab import registry
from shardlab.errors import MissingExtra, UnknownName


class OpenTrackerRun(Protocol):
    """A run in an experiment tracker to which values of steps (points) can be added until the run ends."""

    def log(self, points: Sequence[TrackedStep]) -> None:
        """Add the values of some steps. The step numbers must not be smaller than those of earlier calls."""

    def end(self, run: TrackedRun) -> None:
        """Add the final metrics, and the keys of the configuration that are new since the run was opened; then close the
        run."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """An export format that `collect export --to NAME` offers."""

    name: str
    summary: str
    """One line that describes the format."""
    written_names: frozenset[str]
    """Names of all files and folders that this format writes."""
    write: Callable[[LoadedMatrix, Summary, Path, Path], None]
    """The function that writes the export into a new, empty folder. Its third argument is this folder. Its fourth argument is
    the path to which the folder is moved afterwards; formats that write paths into files need it."""
    package: str | None = None
    """The optional package that the format imports, one of shardlab.extras; None: it needs none."""
    follow: Callable[[str, TrackedRun, Path], OpenTrackerRun] | None = None
    """Only for experiment trackers: the function that opens a run in the tracker while the run is still going on. Its arguments
    are the name of the experiment, the run, and a folder that several runs share. If the folder already contains files of this
    run, they are replaced."""


def load_export_formats() -> dict[str, Export]:
    """All export formats: {name: format}."""
    return {module.EXPORT.name: module.EXPORT for module in registry.load_plugins("collect.exports")}


def find_export_format(name: str) -> Export:
    """The export format with this name.

    Raises UnknownName, with a list of all formats, if there is no format of this name, and MissingExtra if the package that the
    format needs is not installed.
    """
    formats = load_export_formats()
    if name not in formats:
        raise UnknownName("export format", name, formats, summaries={name: entry.summary for name, entry in formats.items()})
    entry = formats[name]
    if entry.package and importlib.util.find_spec(entry.package) is None:
        raise MissingExtra(f"collect export --to {name}", entry.package)
    return entry


def import_package(module_name: str) -> ModuleType:
    """Import a module of an optional package by the name of the module.

    The module is imported only when a format needs it, because all other commands must work without the package. Because of
    this late import, mypy does not know the types of the module.
    """
    return importlib.import_module(module_name)


@contextlib.contextmanager
def set_environment_variables(**value_by_variable: str) -> Iterator[None]:
    """Set environment variables inside a `with` block, and restore their earlier values at its end.

    Some libraries of experiment trackers read options only from environment variables.
    """
    earlier_value_by_variable = {variable_name: os.environ.get(variable_name) for variable_name in value_by_variable}
    os.environ.update(value_by_variable)
    try:
        yield
    finally:
        for variable_name, earlier_value in earlier_value_by_variable.items():
            if earlier_value is None:
                del os.environ[variable_name]
            else:
                os.environ[variable_name] = earlier_value


def write_export(export_format: Export, loaded: LoadedMatrix, summary: Summary, folder: Path) -> list[Path]:
    """Write an export into `folder`, in place of an earlier export there. Returns the paths of its files and folders.

    Raises InputError if `folder` contains anything that this format does not write, and WorkspaceError if the
    export cannot be written.
    """
    with atomic_folder.replace_folder(folder, export_format.written_names, f"a {export_format.name} export") as new_folder:
        export_format.write(loaded, summary, new_folder, folder)
    return sorted(folder / name for name in export_format.written_names if (folder / name).exists())
