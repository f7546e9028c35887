"""Opens files of runs for reading. Neither a name from the browser nor a link in a run folder can lead out of the folder
`runs`."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path

MOST_ENTRIES = 1000  # the most entries of a folder that are listed


def open_below(root: Path, names: Sequence[str]) -> io.BufferedReader | list[str]:
    """Open a file below the folder `root` for reading. If the path is a folder, return the sorted names of its entries instead.

    The names of folders end in a slash. names: the parts of the path below `root`. Raises OSError if the path does not exist,
    is neither a regular file nor a folder, or contains a link.
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
