"""The files of a plug-in of a workspace: one file of Python, and the helpers of its folder.

WORKSPACE/workloads/NAME.py defines the workload NAME, WORKSPACE/strategies/NAME.py a family of strategies. Files of these
folders whose names begin with `_` are helpers, which the other files may import; they count as a part of each plug-in of their
folder. The digest over the file and the helpers is a key of the cell, so that two plug-ins of one name are never taken for the
same.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from shardlab import files
from shardlab.errors import InputError, WorkspaceError

CARRIED = ("workloads", "strategies")  # folders of a workspace whose plug-ins runs execute, so that they go to the cluster
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
MOST_BYTES = 1 << 20  # of one file


class PluginSource(msgspec.Struct, frozen=True):
    """file: the path of the file that defines a plug-in. contents: that file and every helper, by the name of the file."""

    file: Path
    contents: dict[str, bytes]

    @property
    def name(self) -> str:
        """The name of the plug-in."""
        return self.file.stem

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over the names and contents of the files."""
        sha256 = hashlib.sha256()
        for name, content in sorted(self.contents.items()):
            sha256.update(f"{name} {len(content)}\n".encode() + content)
        return sha256.hexdigest()[:16]


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that are a plug-in each, by name; none if the folder does not exist."""
    return sorted(path for path in python_files(folder) if not path.name.startswith("_"))


def read(file: Path) -> PluginSource:
    """The file with its helpers; a configuration (.json) has none. Raises InputError for a name that no plug-in may have, and
    for a file that is too long or cannot be read."""
    if file.suffix == ".json":
        return PluginSource(file, {file.name: _content(file)})
    if not NAME.fullmatch(file.stem):
        raise InputError(
            f"{file}: {file.stem!r} cannot be the name of a plug-in. Allowed: a file name that matches {NAME.pattern}.py."
        )
    helpers = [path for path in python_files(file.parent) if path.name.startswith("_")]
    return PluginSource(file, {path.name: _content(path) for path in (file, *helpers)})


def texts(workspace: Path) -> dict[str, bytes]:
    """All plug-ins of a workspace that runs execute, with their helpers, by their path in it. Raises InputError for a file that
    cannot be read."""
    return {f"{folder}/{path.name}": _content(path) for folder in CARRIED for path in python_files(workspace / folder)}


def python_files(folder: Path) -> list[Path]:
    """The plug-ins and helpers in a folder, by name."""
    return [folder / name for name in files.names(folder) if name.endswith(".py") and not name.startswith(".")]


def _content(path: Path) -> bytes:
    try:
        with files.open_regular(path) as handle:
            content = handle.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {os.strerror(error.errno) if error.errno else error}.") from None
    if len(content) > MOST_BYTES:
        raise InputError(f"{path}: longer than {MOST_BYTES >> 20} MiB. Allowed: Python code; data belongs in files of its own.")
    return content


def write(folder: Path, source: PluginSource) -> None:
    """Copy the files into a new folder. Raises WorkspaceError."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "write") from error
    for name, content in source.contents.items():
        files.write_new(folder / name, content)
