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

LEFT_S = 24 * 3600  # a temporary folder that is older than this number of seconds is no longer in use


def store(workspace: Workspace) -> Path:
    """The folder of the workspace that contains the frozen copies. The name of each copy is the digest of its files."""
    return workspace_trust.copies(workspace, workspace_trust.ANSWERS)


def freeze(workspace: Workspace, sources: Iterable[PluginSource]) -> None:
    """Copy the plug-in files into the store, unless the store has an undamaged copy already. Raises WorkspaceError."""
    with files.as_workspace_error("clean up"):
        for left in store(workspace).glob(".*.tmp"):  # left by a command that was killed
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left, ignore_errors=True)
    for source in sources:
        _keep(workspace, source)


def copy(folder: Path, file: str, code: str) -> PluginSource | None:
    """Read the copy of a plug-in from a folder; None if the files of the copy are missing or do not have the digest `code`.

    file: the path of the plug-in file that was copied; only the last part of the path is used.
    """
    found = folder / Path(file).name
    return plugin_source.read(found) if _digest(found) == code else None


def _keep(workspace: Workspace, source: PluginSource) -> None:
    final = store(workspace) / source.digest
    new = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    with files.as_workspace_error("write"):
        if final.is_dir() and _digest(final / source.file.name) == source.digest:
            return
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        plugin_source.write(new, source)
        new.rename(final)


def _digest(file: Path) -> str | None:
    try:
        return plugin_source.read(file).digest
    except ShardlabError:
        return None
