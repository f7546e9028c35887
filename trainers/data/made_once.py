"""Creates a file only once, even if several ranks and runs need the file at the same time: one process creates it, and the
other processes wait."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from shardlab.cluster import data_cache
from shardlab.files import files


def choose_writable_path(path: Path) -> Path:
    """The path at which a file can be written: `path` if this file exists or if its folder is writable; otherwise a path with
    the same file name in this user's cache, because the data path may be a folder of the site in which users cannot write."""
    if path.exists() or not path.parent.exists() or data_cache.is_writable(path.parent):
        return path
    return data_cache.find_cache_folder(path.parent) / path.name


def create_file_once(path: Path, write_file: Callable[[Path], None]) -> None:
    """Create `path` if it does not exist. `write_file` writes a temporary file, which is then renamed, so `path` is never
    incomplete.

    A lock file ensures that only one process at a time creates the file. Raises WorkspaceError.
    """
    if path.exists():
        return
    with files.hold_lock(path.parent / f".{path.name}.lock"), files.as_workspace_error("make the data set"):
        if path.exists():
            return
        temporary_folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            write_file(temporary_folder / path.name)
            (temporary_folder / path.name).rename(path)
            files.sync_folder(path.parent)
        finally:
            shutil.rmtree(temporary_folder, ignore_errors=True)
