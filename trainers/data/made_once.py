"""Makes a data set once per data folder, even if several ranks and runs need it at once: one makes it, the others wait."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from shardlab import data_cache, files


def writable(path: Path) -> Path:
    """`path` if it exists or can be made there; otherwise a path of the same name in this user's cache, because the data path
    may be a copy of the site that nobody may change."""
    if path.exists() or not path.parent.exists() or data_cache.is_writable(path.parent):
        return path
    return data_cache.folder_of(path.parent) / path.name


def make_once(path: Path, make: Callable[[Path], None]) -> None:
    """If `path` does not exist, `make` writes a temporary file beside it, which is then renamed: `path` is whole or absent.

    Raises WorkspaceError.
    """
    if path.exists():
        return
    files.make_folder(path.parent)
    with files.as_workspace_error("make the data set"):
        lock = os.open(path.parent / f".{path.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it however this process ends
            if path.exists():
                return
            folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            try:
                make(folder / path.name)
                (folder / path.name).rename(path)
                files.sync_folder(path.parent)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
