"""The folder for shardlab's own files about data sets that are in a folder of the site, where this user cannot write."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shardlab.files import own_folder


def is_writable(data_path: Path) -> bool:
    """Whether this user can write to the folder of data sets. If the folder does not exist: to its nearest existing parent."""
    folder = data_path
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


def find_cache_folder(data_path: Path) -> Path:
    """The folder in this user's cache for shardlab's own files about the data sets in `data_path`. It may not exist yet.

    Two spellings of one data path, for example with and without a symlink, have the same folder in the cache.
    """
    return own_folder.make_cache_path("data") / hashlib.sha256(os.fsencode(data_path.resolve())).hexdigest()[:12]
