"""The paths of the files of data sets, to report missing files before a run starts.

Needs neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainers.data import cifar10, imagenet, mnist, token_sets
from trainers.data.images import not_staged

FOLDERS = {"cifar10": cifar10.FOLDER, "mnist": mnist.FOLDER, "imagenet": imagenet.FOLDER}


class Place(NamedTuple):
    """The file or folder that a data set is read from. refusal: the error message if it does not exist."""

    name: str
    path: Path
    refusal: str


def of(options: Mapping[str, Any], data_path: Path) -> Place | None:
    """The place of the data set that a cell with these options reads, or None for a set that needs no file."""
    name = str(options.get("data"))
    if name in FOLDERS:
        folder = data_path / FOLDERS[name]
        return Place(name, folder, str(not_staged(name, folder)))
    if name == "tokens" and options.get("tokens_file") is not None:
        path = token_sets.path_of(str(options["tokens_file"]), data_path)
        return Place(name, path, str(token_sets.no_such_file(path)))
    return None
