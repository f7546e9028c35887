"""The folder for our own files about a data path that this user can only read, such as a site's copy of a data set."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def is_writable(data_path: Path) -> bool:
    """Whether this user can write to the data path or, if it does not exist, to the nearest folder in which it can be made."""
    place = data_path
    while not place.exists() and place != place.parent:
        place = place.parent
    return os.access(place, os.W_OK)


def folder_of(data_path: Path) -> Path:
    """A folder in this user's cache, the same one for all paths of the data path. It may not exist yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shardlab" / "data" / hashlib.sha256(os.fsencode(data_path.resolve())).hexdigest()[:12]
