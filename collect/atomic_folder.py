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
PROBE_BYTES = 2**20  # size in bytes of the test file with which `check_free_space` checks that the disk is not full
STALE_S = 3600  # a temporary folder older than this was left by a killed writer and is removed; a newer folder may be in use


@contextlib.contextmanager
def replace_folder(folder: Path, own_names: frozenset[str], content_noun: str = "a report") -> Iterator[Path]:
    """Yield a new, empty folder. When the block ends without an error, the new folder replaces `folder`.

    own_names: the names of files and folders that the writer creates in `folder`. content_noun: a noun for the content of
    `folder`, such as "a report", for the error message.

    Raises InputError, before anything is written, if `folder` contains a name that is not in `own_names`, because replacing the
    folder would delete files that somebody else put there.
    """
    _refuse_foreign_names(folder, own_names, content_noun)
    new_folder = _make_temporary_path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_folders(folder)
        new_folder.mkdir()
        try:
            yield new_folder
            _refuse_foreign_names(folder, own_names, content_noun)
            if folder.exists():
                _exchange_folders(new_folder, folder)
            else:
                new_folder.rename(folder)
            files.sync_folder(folder.parent)
        finally:
            shutil.rmtree(new_folder, ignore_errors=True)
    except OSError as error:
        file_name = str(error.filename or folder).replace(str(new_folder), str(folder))
        raise WorkspaceError.from_os_error(OSError(error.errno, error.strerror, file_name), "write") from error
    except WorkspaceError as error:
        raise WorkspaceError(str(error).replace(str(new_folder), str(folder))) from error


def check_free_space(new_folder: Path) -> None:
    """Raise OSError if the disk that contains the new folder is full. new_folder: the new folder, as `replace_folder` yields
    it.

    The export to Weights & Biases needs this check, because its library writes in a separate process and does not report that a
    write failed. If the disk was too full for the library, it is also too full for the test file that this function allocates.
    """
    probe_path = new_folder / ".room"
    with probe_path.open("xb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, PROBE_BYTES)
    probe_path.unlink()


def _refuse_foreign_names(folder: Path, own_names: frozenset[str], content_noun: str) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{folder}: is not a folder. Allowed: a new folder, or one that holds {content_noun}.")
    foreign_names = sorted(entry.name for entry in folder.iterdir() if entry.name not in own_names) if folder.exists() else []
    if foreign_names:
        raise InputError(
            f"{folder}: holds {foreign_names[0]!r}, which is not part of {content_noun} and would be lost. "
            f"Allowed with --out: a new folder, or one that holds {content_noun} and nothing else."
        )


def _make_temporary_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")


def _remove_stale_folders(folder: Path) -> None:
    for leftover_folder in folder.parent.glob(f".{folder.name}.*.tmp"):
        if leftover_folder.is_dir() and time.time() - leftover_folder.stat().st_mtime > STALE_S:
            shutil.rmtree(leftover_folder, ignore_errors=True)


def _exchange_folders(new_folder: Path, folder: Path) -> None:
    """Exchange the new folder `new_folder` and the old folder `folder`, so that each gets the path of the other."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename and rename(_AT_FDCWD, os.fsencode(new_folder), _AT_FDCWD, os.fsencode(folder), _RENAME_EXCHANGE) == 0:
        return
    # Some file systems (NFS) cannot exchange two folders in one step, so the folders are renamed one after the other. If the
    # process is killed between two renames, the old folder still exists under the temporary name `old`.
    old_path = _make_temporary_path(folder)
    folder.rename(old_path)
    new_folder.rename(folder)
    old_path.rename(new_folder)
