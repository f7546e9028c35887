"""The frozen copies of the folders of commands in a workspace, and a copy as one compressed archive, which can be sent."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.errors import InputError
from shardlab.files import files

if TYPE_CHECKING:
    import tarfile


MOST_BYTES = 200 * 10**6  # the largest size of all files of a command together
MOST_FILES = 20_000


def find_copy(store_folder: Path, digest: str) -> Path:
    """The path of the frozen copy of a command's folder. store_folder: the folder of frozen copies."""
    return store_folder / f"command-{digest}"


def list_copy(folder: Path) -> list[str]:
    """The paths of all files in a frozen copy, relative to it, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def is_intact(copy_folder: Path, digest: str) -> bool:
    """Whether a folder has the files with this digest and no others."""
    try:
        return copy_folder.is_dir() and digest_files(copy_folder, list_copy(copy_folder)) == digest
    except InputError:
        return False


def digest_files(folder: Path, file_names: Sequence[str]) -> str:
    """The digest of files. Raises InputError if a file cannot be read."""
    sha256 = hashlib.sha256()
    for name in sorted(file_names):
        path = folder / name
        try:
            content = os.fsencode(path.readlink()) if path.is_symlink() else files.read(path, MOST_BYTES + 1)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}.") from None
        mode_letter = "l" if path.is_symlink() else "x" if path.stat().st_mode & 0o100 else "-"
        sha256.update(os.fsencode(f"{name} {mode_letter} {len(content)}\n") + content)
    return sha256.hexdigest()[:16]


def pack_files(folder: Path, file_names: Sequence[str]) -> bytes:
    """Files of a folder as a compressed tar archive, without their owners. Equal files give equal bytes.

    file_names: the paths of the files relative to the folder. Raises InputError if a file cannot be read.
    """
    import gzip  # not at the top: each start of a command imports this module
    import tarfile

    tar_file = io.BytesIO()
    try:
        with tarfile.open(fileobj=tar_file, mode="w") as archive:
            for name in file_names:
                archive.add(folder / name, name, recursive=False, filter=_remove_owner)
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be read: {error.strerror or error}.") from None
    return gzip.compress(tar_file.getvalue(), compresslevel=1, mtime=0)


def _remove_owner(tar_member: tarfile.TarInfo) -> tarfile.TarInfo:
    return tar_member.replace(uid=0, gid=0, uname="", gname="", deep=False)
