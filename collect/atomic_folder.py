"""Replaces a folder by a new folder in one step.

A reader finds either the complete old folder or the complete new folder, even if the writer was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
ROOM = 2**20  # size in bytes of the test file with which `must_have_room` checks that the disk is not full
STALE_S = 3600  # a temporary folder older than this was left by a killed writer and is removed; a newer folder may be in use


@contextlib.contextmanager
def replacing(folder: Path, ours: frozenset[str], what: str = "a report") -> Iterator[Path]:
    """Yield a new, empty folder. When the block ends without an error, the new folder replaces `folder`.

    ours: the names of files and folders that the writer creates in `folder`. what: a noun for the content of `folder`, such as
    "a report", for the error message.

    Raises InputError, before anything is written, if `folder` contains a name that is not in `ours`, because replacing the
    folder would delete files that somebody else put there.
    """
    _refuse_foreign(folder, ours, what)
    fresh = _beside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        fresh.mkdir()
        try:
            yield fresh
            _refuse_foreign(folder, ours, what)
            if folder.exists():
                _exchange(fresh, folder)
            else:
                fresh.rename(folder)
            files.sync_folder(folder.parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        meant = str(error.filename or folder).replace(str(fresh), str(folder))
        raise WorkspaceError.from_os_error(OSError(error.errno, error.strerror, meant), "write") from error
    except WorkspaceError as error:
        raise WorkspaceError(str(error).replace(str(fresh), str(folder))) from error


def must_have_room(fresh: Path) -> None:
    """Raise OSError if the disk that contains the new folder is full. fresh: the new folder, as `replacing` yields it.

    The export to Weights & Biases needs this check, because its library writes in a separate process and does not report that a
    write failed. If the disk was too full for the library, it is also too full for the test file that this function allocates.
    """
    probe = fresh / ".room"
    with probe.open("xb", buffering=0) as handle:
        os.posix_fallocate(handle.fileno(), 0, ROOM)
    probe.unlink()


def _refuse_foreign(folder: Path, ours: frozenset[str], what: str) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{folder}: is not a folder. Allowed: a new folder, or one that holds {what}.")
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours) if folder.exists() else []
    if foreign:
        raise InputError(
            f"{folder}: holds {foreign[0]!r}, which is not part of {what} and would be lost. "
            f"Allowed with --out: a new folder, or one that holds {what} and nothing else."
        )


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")


def _sweep(folder: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        if left.is_dir() and time.time() - left.stat().st_mtime > STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _exchange(fresh: Path, folder: Path) -> None:
    """Exchange the new folder `fresh` and the old folder `folder`, so that each gets the path of the other."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename and rename(_AT_FDCWD, os.fsencode(fresh), _AT_FDCWD, os.fsencode(folder), _RENAME_EXCHANGE) == 0:
        return
    # Some file systems (NFS) cannot exchange two folders in one step, so the folders are renamed one after the other. If the
    # process is killed between two renames, the old folder still exists under the temporary name `old`.
    old = _beside(folder)
    folder.rename(old)
    fresh.rename(folder)
    old.rename(fresh)
