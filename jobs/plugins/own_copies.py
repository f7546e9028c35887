"""Frozen copies of the plug-ins of a workspace, made at submission: WORKSPACE/.shardlab/own/DIGEST.

Code in the folder of a run may have come from another machine, so a new attempt uses the copy that was made here.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.files import files, plugin_source
from shardlab.files.plugin_source import PluginSource
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

OUTDATED_S = 24 * 3600  # a temporary folder that is older than this number of seconds is no longer in use


def find_plugin_copies_folder(workspace: Workspace) -> Path:
    """The folder of the workspace that contains the frozen copies. The name of each copy is the digest of its files."""
    return workspace_trust.copies_folder(workspace, workspace_trust.ANSWERS_FOLDER)


def freeze_sources(workspace: Workspace, sources: Iterable[PluginSource]) -> None:
    """Copy the plug-in files into the store, unless the store has an undamaged copy already. Raises WorkspaceError."""
    with files.as_workspace_error("clean up"):
        for temporary_folder in find_plugin_copies_folder(workspace).glob(".*.tmp"):  # left by a command that was killed
            if time.time() - temporary_folder.stat().st_mtime > OUTDATED_S:
                shutil.rmtree(temporary_folder, ignore_errors=True)
    for source in sources:
        _store_copy(workspace, source)


def read_copy(folder: Path, file: str, code: str) -> PluginSource | None:
    """Read the copy of a plug-in from a folder; None if the files of the copy are missing or do not have the digest `code`.

    file: the path of the plug-in file that was copied; only the last part of the path is used.
    """
    copied_path = folder / Path(file).name
    return plugin_source.read_plugin(copied_path) if _read_digest(copied_path) == code else None


def _store_copy(workspace: Workspace, source: PluginSource) -> None:
    final_folder = find_plugin_copies_folder(workspace) / source.digest
    new_folder = final_folder.with_name(f".{final_folder.name}.{os.getpid()}.tmp")
    with files.as_workspace_error("write"):
        if final_folder.is_dir() and _read_digest(final_folder / source.file.name) == source.digest:
            return
        shutil.rmtree(new_folder, ignore_errors=True)
        shutil.rmtree(final_folder, ignore_errors=True)
        plugin_source.write_plugin(new_folder, source)
        new_folder.rename(final_folder)


def _read_digest(file: Path) -> str | None:
    try:
        return plugin_source.read_plugin(file).digest
    except ShardlabError:
        return None
