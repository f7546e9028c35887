"""Copies shardlab's own source into the workspace when runs are rendered.

Runs use the copy, so later changes of shardlab do not affect these runs.
The name of a copy's folder is the digest of the copied files. A copy never changes, except that Python may add bytecode.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jobs.plugins import plugin_store
from jobs.status.reconcile import read_statuses
from shardlab.errors import ShardlabError
from shardlab.files import files, source_digest
from shardlab.runs.state import FINAL_STATES
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

# files that are synced to the disk at the same time: to sync them one after another would take seconds
MOST_PARALLEL_SYNCS = 32


def find_source_copies_folder(workspace: Workspace) -> Path:
    """The folder of the workspace that contains all copies of the source."""
    return workspace_trust.find_copies_folder(workspace, workspace_trust.SOURCE_FOLDER)


def freeze_source(copy_folder: Path) -> None:
    """Copy the source that this process uses to the folder `copy_folder`, unless the folder already contains an undamaged copy.

    copy_folder: the folder, whose name is the digest of the source. A copy that another person may have made or changed is
    replaced: Python executes the bytecode beside the source, and imports every file that lies there, and the digest covers
    neither. Raises WorkspaceError, and InputError if a source file changes while it is copied."""
    if (
        copy_folder.is_dir()
        and workspace_trust.explain_write_access(copy_folder) is None
        and source_digest.is_complete_copy(copy_folder)
    ):
        return
    fault_text = f"{source_digest.ROOT}: a file changed while this command read it"
    with plugin_store.open_new_copy(
        copy_folder, lambda new_folder: source_digest.digest_source(new_folder) == copy_folder.name, fault_text
    ) as new_folder:
        _copy_source(new_folder)


def remove_unused_copies(workspace: Workspace, current_copy: Path) -> None:
    """Remove the copies that no unfinished run uses, but never the copy `current_copy`. If the records of a run cannot be read,
    no copy is removed."""
    copies_folder = find_source_copies_folder(workspace)
    copy_by_name = {
        copy_name: copies_folder / copy_name for copy_name in files.list_names(copies_folder) if copy_name != current_copy.name
    }
    run_copy_names = []
    for run_dir in workspace.list_run_dirs() if copy_by_name else []:
        try:
            source_path = run_dir.read_run().source
        except ShardlabError:
            return
        if source_path is not None and Path(source_path).name in copy_by_name:
            run_copy_names.append((run_dir, Path(source_path).name))
    run_statuses = read_statuses(workspace, [run_dir for run_dir, _ in run_copy_names])
    needed_names = {
        copy_name
        for (_, copy_name), status in zip(run_copy_names, run_statuses, strict=True)
        if status.state not in FINAL_STATES
    }
    for copy_name, copy_path in copy_by_name.items():
        if copy_name not in needed_names:
            shutil.rmtree(copy_path, ignore_errors=True)


def _copy_source(new_folder: Path) -> None:
    """Copy the source files and their bytecode to the folder `new_folder`, and sync the source files to the disk.

    The modification times are copied too: Python uses bytecode only if it matches the time of the source file.
    """
    copied_files = []
    for source_path in source_digest.list_source_files(source_digest.RUN_PACKAGES):
        target_path = new_folder / source_path.relative_to(source_digest.ROOT)
        target_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_path, target_path)
        target_path.chmod(0o444)
        copied_files.append(target_path)
        if source_path.suffix == ".py":
            bytecode_path = Path(importlib.util.cache_from_source(str(target_path)))
            with contextlib.suppress(OSError):  # without readable bytecode, Python compiles the file again
                bytecode_path.parent.mkdir(exist_ok=True)
                shutil.copy2(importlib.util.cache_from_source(str(source_path)), bytecode_path)
    for folder, _, _ in os.walk(new_folder):
        Path(folder).chmod(0o755)
    with ThreadPoolExecutor(MOST_PARALLEL_SYNCS) as thread_pool:
        list(thread_pool.map(_sync_file, copied_files))


def _sync_file(path: Path) -> None:
    with files.open_regular(path) as file_handle:
        os.fsync(file_handle.fileno())
