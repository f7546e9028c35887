"""The files of runs, opened for reading. No name that a browser sends, and no link in a run, leads out of the folder."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path

MOST_ENTRIES = 1000  # of a folder that are listed


def open_below(root: Path, names: Sequence[str]) -> io.BufferedReader | list[str]:
    """A file below a folder, open for reading; for a folder the sorted names in it, with a slash after those of folders.

    Raises OSError if it is not there, if it is neither a regular file nor a folder, or if the path has a link.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise FileNotFoundError(name)
            inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            file = os.fdopen(descriptor, "rb")
            descriptor = -1
            return file
        if not stat.S_ISDIR(mode):
            raise FileNotFoundError(names[-1] if names else str(root))
        with os.scandir(descriptor) as entries:
            found = sorted(f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name for entry in entries)
        return found[:MOST_ENTRIES]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
