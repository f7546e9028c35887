"""The list of image files that a run reads: drawn once and written with a checksum each, so that later runs read the same.

A list is a file of JSON lines: first a header, then `[path, class, SHA-256]` for each image, in the order of the paths.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from shardlab import files
from shardlab.decoders import DECODE_FAULTS
from shardlab.errors import InputError, WorkspaceError
from trainers.data.images import draw
from trainers.data.made_once import make_once, writable

SCHEMA = 1
SUFFIXES = (".jpeg", ".jpg")


class ListHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a list: it has `images` images of a split, drawn from `found` images by `seed` if `seed` is not null."""

    schema: int
    split: str
    classes: int
    found: int
    images: int
    seed: int | None


class ImageEntry(msgspec.Struct, frozen=True, array_like=True):
    """An image: its path within the data set's folder, its class, and its file's SHA-256 in hexadecimal."""

    path: str
    label: int
    sha256: str


class ImageList(msgspec.Struct, frozen=True):
    """A list as read, and the SHA-256 of its file, which covers the checksum of every image in the list."""

    head: ListHeader
    entries: list[ImageEntry]
    sha256: str


def ready(root: Path, split: str, subset: int | None, seed: int) -> ImageList:
    """The list of `root/train` or `root/val`, made at `path_of` if it does not exist. Raises InputError, WorkspaceError.

    The first caller reads every drawn image once, for its checksum; all later callers read the list.
    """
    path = path_of(root, split, subset, seed)
    make_once(path, lambda temporary: _make(root, split, subset, seed, temporary))
    return read(path, split, subset)


def path_of(root: Path, split: str, subset: int | None, seed: int) -> Path:
    """Where the list is, or will be made: beside `root`, or in the user's cache if that folder cannot be written."""
    return writable(root.with_name(file_name(root, split, subset, seed)))  # `root` may be a link to a folder that is not ours


def file_name(root: Path, split: str, subset: int | None, seed: int) -> str:
    """The name of a list, by all that decides its content."""
    drawn = f"-{subset}-seed-{seed}" if subset else ""
    return f"{root.name}-{split}{drawn}.list"


def read(path: Path, split: str, subset: int | None) -> ImageList:
    """A list, checked line by line. Raises InputError, naming the file and the line."""
    with files.as_workspace_error("read the list of images"):
        lines = path.read_bytes().splitlines()
    try:
        head = msgspec.json.decode(lines[0] if lines else b"", type=ListHeader)
    except DECODE_FAULTS as error:
        raise InputError(
            f"{path}:1: is not the header of an image list: {error}. Delete the file; the next run makes it again."
        ) from None
    if head.schema != SCHEMA or head.split != split or head.images != len(lines) - 1 or head.images != (subset or head.found):
        raise InputError(
            f"{path}: its first line does not match the lines after it, or the split and subset of this run. "
            "Delete the file; the next run makes it again."
        )
    decoder = msgspec.json.Decoder(ImageEntry)
    entries = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            entry = decoder.decode(line)
        except DECODE_FAULTS as error:
            raise InputError(f"{path}:{number}: is not an entry of an image list: {error}.") from None
        parts = entry.path.split("/")
        if (
            not 0 <= entry.label < head.classes
            or len(parts) != 3
            or parts[0] != split
            or not set(parts).isdisjoint({"", ".", ".."})
        ):
            allowed = f"{split}/CLASS/FILE, 0 to {head.classes - 1}"
            raise InputError(f"{path}:{number}: found {entry.path!r} of class {entry.label}. Allowed: {allowed}.")
        entries.append(entry)
    return ImageList(head, entries, hashlib.sha256(b"\n".join(lines)).hexdigest())


def class_names(root: Path) -> list[str]:
    """The names of the folders of `root/train`, sorted; the number of a class is its position. Raises InputError."""
    names = sorted(entry.name for entry in _entries(root / "train") if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise InputError(
            f"{root / 'train'}: found {len(names)} class folders. Allowed: at least 2, one per class, named by its wnid."
        )
    return names


def _make(root: Path, split: str, subset: int | None, seed: int, path: Path) -> None:
    names = class_names(root)
    found = [(name, label) for label, folder in enumerate(names) for name in _images(root, split, folder)]
    strangers = {entry.name for entry in _entries(root / split) if entry.is_dir() and not entry.name.startswith(".")} - set(
        names
    )
    if strangers:
        raise InputError(
            f"{root / split / min(strangers)}: is not a class of {root / 'train'}. Allowed: its {len(names)} folders."
        )
    if not found:
        raise InputError(f"{root / split}: found no image. Allowed: CLASS/*.JPEG, as in the official archive.")
    chosen = found if subset is None else [found[i] for i in draw(len(found), subset, seed, str(root / split))]
    head = ListHeader(SCHEMA, split, len(names), len(found), len(chosen), None if subset is None else seed)
    with files.as_workspace_error("read the data set"), ThreadPoolExecutor(8) as threads:
        digests = threads.map(files.sha256, [root / name for name, _ in chosen])
        entries = [ImageEntry(name, label, digest) for (name, label), digest in zip(chosen, digests, strict=True)]
    files.write_atomic(path, b"".join(msgspec.json.encode(line) + b"\n" for line in [head, *entries]))


def _images(root: Path, split: str, folder: str) -> list[str]:
    place = root / split / folder
    if split != "train" and not place.is_dir():
        return []  # a validation split need not show every class
    return [f"{split}/{folder}/{name}" for name in sorted(e.name for e in _entries(place) if e.name.lower().endswith(SUFFIXES))]


def _entries(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        raise InputError(f"{folder}: no such folder. Allowed: train/CLASS/*.JPEG and val/CLASS/*.JPEG.") from None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read the data set") from error
