"""The source files of a plug-in of a workspace: the Python file that defines it, and the helpers in the same folder.

WORKSPACE/workloads/NAME.py defines the workload NAME, WORKSPACE/strategies/NAME.py a family of strategies, and
WORKSPACE/metrics/NAME.py metrics. Files in these folders whose names begin with `_` are helpers, which the other files may
import. Each plug-in has all helpers of its folder. The digest of the file and the helpers is a key of the cell, so two cells
differ if their plug-ins have the same name but different contents.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from shardlab.errors import InputError
from shardlab.files import files

CARRIED_FOLDERS = ("workloads", "strategies")  # folders with plug-ins that runs execute, so the cluster needs a copy
CODE_FOLDERS = (*CARRIED_FOLDERS, "metrics")  # all folders of a workspace whose Python files shardlab executes
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,31}")
MOST_BYTES = 1 << 20  # largest size of one file


class PluginSource(msgspec.Struct, frozen=True):
    """The source of a plug-in."""

    file: Path
    """The path of the file that defines the plug-in."""
    contents: dict[str, bytes]
    """The content of this file and of every helper, by file name."""

    @property
    def name(self) -> str:
        """The name of the plug-in."""
        return self.file.stem

    @property
    def digest(self) -> str:
        """The digest of the names and contents of the files: 16 hexadecimal digits of SHA-256."""
        sha256 = hashlib.sha256()
        for file_name, file_content in sorted(self.contents.items()):
            sha256.update(f"{file_name} {len(file_content)}\n".encode() + file_content)
        return sha256.hexdigest()[:16]


def list_plugin_files(folder: Path) -> list[Path]:
    """The files in a folder that define plug-ins (helpers are left out), sorted by name; none if the folder does not exist."""
    return sorted(path for path in list_code_files(folder) if not path.name.startswith("_"))


def read_plugin(plugin_path: Path) -> PluginSource:
    """Read the source of the plug-in that a file defines: a Python file with its helpers, or a model configuration (.json).

    Raises InputError if the name of the file is not allowed for a plug-in, or if a file is too long or cannot be read.
    """
    if plugin_path.suffix == ".json":
        return PluginSource(plugin_path, {plugin_path.name: read_plugin_file(plugin_path)})
    if not NAME_PATTERN.fullmatch(plugin_path.stem):
        raise InputError(
            f"{plugin_path}: {plugin_path.stem!r} cannot be the name of a plug-in. Allowed: a file name that matches "
            f"{NAME_PATTERN.pattern}.py."
        )
    helper_paths = [path for path in list_code_files(plugin_path.parent) if path.name.startswith("_")]
    return PluginSource(plugin_path, {path.name: read_plugin_file(path) for path in (plugin_path, *helper_paths)})


def read_carried_files(workspace: Path) -> dict[str, bytes]:
    """The contents of all plug-ins and helpers in the folders CARRIED_FOLDERS of a workspace, by their paths in the workspace.

    Raises InputError for a file that is too long or cannot be read.
    """
    return {
        f"{folder}/{path.name}": read_plugin_file(path)
        for folder in CARRIED_FOLDERS
        for path in list_code_files(workspace / folder)
    }


def list_code_files(folder: Path) -> list[Path]:
    """The plug-ins and helpers in a folder, sorted by name; none if the folder does not exist."""
    return [folder / name for name in files.list_names(folder) if name.endswith(".py") and not name.startswith(".")]


def read_plugin_file(plugin_path: Path, allowed_content: str = "Python code; data belongs in files of its own") -> bytes:
    """The content of a file. allowed_content: what the file may contain. Raises InputError if it is too long or cannot be
    read."""
    try:
        return files.read(plugin_path, MOST_BYTES)
    except files.TooLarge:
        raise InputError(f"{plugin_path}: longer than {MOST_BYTES >> 20} MiB. Allowed: {allowed_content}.") from None
    except OSError as error:
        raise InputError(f"{plugin_path}: cannot be read: {os.strerror(error.errno) if error.errno else error}.") from None


def read_submitted_plugin(plugin_path: Path, digest: str | None) -> PluginSource:
    """As `read_plugin`, on a rank. digest: the digest of the plug-in when the run was submitted. Raises InputError also if the
    plug-in was changed after that."""
    plugin_source = read_plugin(plugin_path)
    if plugin_source.digest != digest:
        raise InputError(f"{plugin_path}: has the digest {plugin_source.digest}, the run was submitted with {digest}.")
    return plugin_source


def write_plugin(folder: Path, plugin_source: PluginSource) -> None:
    """Write the files of a plug-in into a folder that has none of them. Raises WorkspaceError."""
    with files.as_workspace_error("write"):
        folder.mkdir(parents=True, exist_ok=True)
    for file_name, file_content in plugin_source.contents.items():
        files.write_new(folder / file_name, file_content)
