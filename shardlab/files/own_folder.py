"""This user's own folder in the user's cache, or in a folder such as /tmp, into which all users of a machine may write.

Another user may already have made something with the expected name, to read what this user writes or to stop the commands of
this user. Such a folder is not used: a folder with a random name is made, which later calls find by its owner and its mode.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def make_cache_path(folder_name: str) -> Path:
    """The path of shardlab's folder `folder_name` in this user's cache. Raises RuntimeError if this user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardlab" / folder_name


def make_own_folder(parent_folder: Path, folder_name: str) -> Path:
    """The folder `folder_name` in `parent_folder`, or a folder `name-RANDOM`, which belongs to this user and which no other
    user can enter.

    The folder is made if it does not exist. Raises OSError.
    """
    with contextlib.suppress(OSError):
        (parent_folder / folder_name).mkdir(mode=0o700)
    if not (own_folders := _find_own_folders(parent_folder, folder_name)):
        new_folder = Path(tempfile.mkdtemp(prefix=f"{folder_name}-", dir=parent_folder))
        own_folders = _find_own_folders(parent_folder, folder_name) or [new_folder]
    return own_folders[0]  # if several folders were created at the same time, all commands choose the first folder by name


def is_our_folder(folder: Path, forbidden_bits: int) -> bool:
    """Whether a path is a folder and not a link, is owned by this user, and has none of the forbidden bits in its mode."""
    try:
        folder_stat = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(folder_stat.st_mode) and folder_stat.st_uid == os.geteuid() and not folder_stat.st_mode & forbidden_bits


def _find_own_folders(parent: Path, folder_name: str) -> list[Path]:
    return [path for path in (parent / folder_name, *sorted(parent.glob(f"{folder_name}-*"))) if is_our_folder(path, 0o077)]
