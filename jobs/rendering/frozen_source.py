"""Copies shardlab's own source into the workspace when runs are rendered.

Runs use the copy, so later changes of shardlab do not affect these runs.
The name of a copy's folder is the digest of the copied files. A copy never changes, except that Python may add bytecode.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jobs.status.reconcile import statuses
from shardlab.errors import ShardlabError
from shardlab.files import files, source_digest
from shardlab.runs.state import FINAL
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

SYNCING = 32  # files that are synced to the disk at the same time: to sync them one after another would take seconds


def folder(workspace: Workspace) -> Path:
    """The folder of the workspace that contains all copies of the source."""
    return workspace_trust.copies(workspace, workspace_trust.SOURCE)


def freeze(copy: Path) -> None:
    """Copy the source that this process uses to the folder `copy`, unless the folder already contains an undamaged copy.

    copy: the folder, whose name is the digest of the source. A copy that another person may have made or changed is replaced:
    Python executes the bytecode beside the source, and imports every file that lies there, and the digest covers neither.
    Raises ShardlabError, also if a source file changes while it is copied.
    """
    if copy.is_dir() and workspace_trust.others_may_write(copy) is None and source_digest.is_whole(copy):
        return
    new = copy.with_name(f".{copy.name}.{secrets.token_hex(4)}.tmp")
    try:
        with files.as_workspace_error("copy shardlab's source"):
            _copy(new)
            if source_digest.source(new) != copy.name:
                raise ShardlabError(f"{source_digest.ROOT}: a file changed while this command read it; run the command again.")
            if copy.exists():  # the existing copy is damaged, or another person may have made it
                copy.rename(damaged := new.with_suffix(".damaged"))
                shutil.rmtree(damaged)
            new.rename(copy)
            files.sync_folder(copy.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def remove_unused(workspace: Workspace, current: Path) -> None:
    """Remove the copies that no unfinished run uses, but never the copy `current`. If the records of a run cannot be read, no
    copy is removed."""
    copies = {name: folder(workspace) / name for name in files.names(folder(workspace)) if name != current.name}
    named = []
    for run_dir in workspace.all_runs() if copies else []:
        try:
            source = run_dir.read_run().source
        except ShardlabError:
            return
        if source is not None and Path(source).name in copies:
            named.append((run_dir, Path(source).name))
    states = statuses(workspace, [run_dir for run_dir, _ in named])
    needed = {name for (_, name), status in zip(named, states, strict=True) if status.state not in FINAL}
    for name, path in copies.items():
        if name not in needed:
            shutil.rmtree(path, ignore_errors=True)


def _copy(new: Path) -> None:
    """Copy the source files and their bytecode to the folder `new`, and sync the source files to the disk.

    The modification times are copied too: Python uses bytecode only if it matches the time of the source file.
    """
    copied = []
    for path in source_digest.sources(source_digest.RUN_PACKAGES):
        target = new / path.relative_to(source_digest.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        target.chmod(0o444)
        copied.append(target)
        if path.suffix == ".py":
            bytecode = Path(importlib.util.cache_from_source(str(target)))
            with contextlib.suppress(OSError):  # without readable bytecode, Python compiles the file again
                bytecode.parent.mkdir(exist_ok=True)
                shutil.copy2(importlib.util.cache_from_source(str(path)), bytecode)
    for folder, _, _ in os.walk(new):
        Path(folder).chmod(0o755)
    with ThreadPoolExecutor(SYNCING) as pool:
        list(pool.map(_sync, copied))


def _sync(path: Path) -> None:
    with files.open_regular(path) as handle:
        os.fsync(handle.fileno())
