"""Copies our source into the workspace when runs are rendered, so that they do not depend on later changes of shardlab.

A copy is named by the digest of its files and never changes. Python may add bytecode to it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jobs.reconcile import statuses
from shardlab import files, source_digest, workspace_trust
from shardlab.errors import ShardlabError
from shardlab.state import FINAL
from shardlab.workspace import Workspace

SYNCING = 32  # files that are synced at the same time: one after another, they would take seconds on a disk


def folder(workspace: Workspace) -> Path:
    """The folder that contains the copies."""
    return workspace.own / workspace_trust.SOURCE


def freeze(copy: Path, *, reuse: bool = True) -> None:
    """Copy the source that this process uses to the folder `copy`, unless an undamaged copy is there.

    The name of the folder is the digest of the source. reuse: false if somebody else may have made a copy that is there: the
    digest does not cover the bytecode beside the source, which Python executes. Raises ShardlabError, also if the source
    changes meanwhile.
    """
    if reuse and copy.is_dir() and source_digest.source(copy) == copy.name:
        return
    new = copy.with_name(f".{copy.name}.{secrets.token_hex(4)}.tmp")
    try:
        with files.as_workspace_error("copy shardlab's source"):
            _copy(new)
            if source_digest.source(new) != copy.name:
                raise ShardlabError(f"{source_digest.ROOT}: a file changed while this command read it; run the command again.")
            if copy.exists():  # damaged, or of somebody else
                copy.rename(damaged := new.with_suffix(".damaged"))
                shutil.rmtree(damaged)
            new.rename(copy)
            files.sync_folder(copy.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def remove_unused(workspace: Workspace, current: Path) -> None:
    """Remove the copies that no unfinished run names, except the current copy; none if a run cannot be read."""
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
    """Copy the files with their times: Python then uses the bytecode that is copied beside them."""
    copied = []
    for path in source_digest.sources(source_digest.PACKAGES):
        target = new / path.relative_to(source_digest.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        target.chmod(0o444)
        copied.append(target)
        if path.suffix == ".py":
            bytecode = Path(importlib.util.cache_from_source(str(target)))
            with contextlib.suppress(OSError):  # there is none, or it cannot be read: Python compiles the file again
                bytecode.parent.mkdir(exist_ok=True)
                shutil.copy2(importlib.util.cache_from_source(str(path)), bytecode)
    with ThreadPoolExecutor(SYNCING) as pool:
        list(pool.map(_sync, copied))


def _sync(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
