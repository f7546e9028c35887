"""The frozen copies of the folders of commands in a workspace, and a copy as one compressed archive, which can be sent."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.errors import InputError

if TYPE_CHECKING:
    import tarfile


def find_copy(store: Path, digest: str) -> Path:
    """The path of the frozen copy of a command's folder. store: the folder of frozen copies."""
    return store / f"command-{digest}"


def list_copy(folder: Path) -> list[str]:
    """The paths of all files in a frozen copy, relative to it, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def pack_files(folder: Path, names: Sequence[str]) -> bytes:
    """Files of a folder as a compressed tar archive, without their owners. Equal files give equal bytes.

    names: the paths of the files relative to the folder. Raises InputError if a file cannot be read.
    """
    import gzip  # not at the top: each start of a command imports this module
    import tarfile

    tar_file = io.BytesIO()
    try:
        with tarfile.open(fileobj=tar_file, mode="w") as archive:
            for name in names:
                archive.add(folder / name, name, recursive=False, filter=_remove_owner)
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be read: {error.strerror or error}.") from None
    return gzip.compress(tar_file.getvalue(), compresslevel=1, mtime=0)


def _remove_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    return member.replace(uid=0, gid=0, uname="", gname="", deep=False)
