"""The names of the data sets, the paths of their files, and the record of a data set in results.

Commands use the paths to report missing files before a run starts. Needs neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shardlab.errors import InputError

IMAGE_DATA_SETS = ("cifar10", "mnist", "imagenet", "synthetic")
TOKEN_DATA_SETS = ("stdlib-text", "synthetic", "tokens")
SPLITS = ("train", "validation")
# The folder of each data set in the data path.
FOLDER_BY_DATA_SET = {"cifar10": "cifar-10-batches-bin", "mnist": "mnist", "imagenet": "imagenet"}


class DataSource(msgspec.Struct, frozen=True):
    """The data of a run, as recorded in its result."""

    name: str
    """Of the data set."""
    sha256: str
    """Of its content."""
    synthetic: bool
    """Whether it is generated."""
    items: int
    """Number of items."""
    classes: int | None = None
    """Number of classes of labelled data, and of outputs of the model's head; None if there are no labels."""


class DataPath(NamedTuple):
    """The file or folder from which a data set is read."""

    name: str
    path: Path
    missing_path_error: str
    """The error message if this path does not exist."""


def find_data_path(options: Mapping[str, Any], data_path: Path) -> DataPath | None:
    """The path of the data set that a cell with these options reads; None if the data set needs no file from the user."""
    data_set_name = str(options.get("data"))
    if data_set_name in FOLDER_BY_DATA_SET:
        folder = data_path / FOLDER_BY_DATA_SET[data_set_name]
        return DataPath(data_set_name, folder, str(make_missing_files_error(data_set_name, folder)))
    if data_set_name == "tokens" and options.get("tokens_file") is not None:
        path = find_token_file(str(options["tokens_file"]), data_path)
        return DataPath(data_set_name, path, str(make_missing_token_file_error(path)))
    return None


def make_missing_files_error(data_set_name: str, missing_path: Path) -> InputError:
    """The error for missing files of a data set. shardlab does not silently use other data instead, such as synthetic data."""
    return InputError(
        f"{missing_path}: not found, so the data set {data_set_name} cannot be read. To let `provision` stage it, write "
        f"`data: {{sets: [{{name: {data_set_name}, archive: PATH_OR_URL}}]}}` into cluster.yaml (docs/data.md). "
        f"Allowed without any file: the data set synthetic."
    )


def find_token_file(tokens_file: str, data_path: Path) -> Path:
    """The path of the token file that a cell names: relative to the data path, or absolute."""
    return data_path / Path(tokens_file).expanduser()


def refuse_copy(options: Mapping[str, Any]) -> str | None:
    """Why the data of a cell with these options cannot be copied to the nodes, as a sentence; None if they can be copied, or
    need no file."""
    tokens_file = str(options.get("tokens_file"))
    if options.get("data") != "tokens" or not (Path(tokens_file).expanduser().is_absolute() or ".." in Path(tokens_file).parts):
        return None
    return (
        f"tokens_file: found {tokens_file!r} with `data: {{stage: node}}`. "
        "Allowed: a path within the data path, such as my.tokens."
    )


def make_missing_token_file_error(path: Path) -> InputError:
    return InputError(f"{path}: no such file. `python -m trainers tokenize TEXT --out {path}` makes it from a text file.")
