"""The folder for our own files about a data path that this user cannot write to, such as a site's copy of a data set."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def is_writable(data_path: Path) -> bool:
    """Whether this user can write to the data path, or, if it does not exist, to its nearest existing parent folder."""
    place = data_path
    while not place.exists() and place != place.parent:
        place = place.parent
    return os.access(place, os.W_OK)


def folder_of(data_path: Path) -> Path:
    """A folder in this user's cache for this data path. It may not exist yet.

    Two spellings of one data path, for example through a symlink, have the same folder.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shardlab" / "data" / hashlib.sha256(os.fsencode(data_path.resolve())).hexdigest()[:12]
