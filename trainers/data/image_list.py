"""The list of image files that a run reads. It is written once, with a checksum for each image, so that later runs use the same
images.

A list is a file of JSON lines: first a header, then `[path, class, SHA-256]` for each image, in the order of the paths.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS
from trainers.data.images import draw_subset
from trainers.data.made_once import choose_writable_path, create_file_once

SCHEMA = 1
JPEG_SUFFIXES = (".jpeg", ".jpg")


class ListHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a list."""

    schema: int
    """Version of the format."""
    split: str
    """`train` or `val`."""
    classes: int
    """Number of classes."""
    found: int
    """Number of images in the folder."""
    images: int
    """Number of images in the list."""
    seed: int | None
    """The seed by which these images were drawn; None if the list has all images."""


class ImageEntry(msgspec.Struct, frozen=True, array_like=True):
    """An image: its path relative to the data set's folder, its class, and the SHA-256 of its file in hexadecimal."""

    path: str
    label: int
    sha256: str


class ImageList(msgspec.Struct, frozen=True):
    """The content of a list, and the SHA-256 of its file. Since the file contains the checksums of all images, this SHA-256
    identifies the content of the images too."""

    header: ListHeader
    entries: list[ImageEntry]
    sha256: str


def ensure_image_list(root: Path, split: str, subset: int | None, subset_seed: int) -> ImageList:
    """The list of `root/train` or `root/val`. If it does not exist, it is written to the path of `find_list_path`.

    The first caller reads every image of the list once, to compute its checksum; all later callers read only the list.

    split: `train` or `val`. subset: number of images to draw; None: all. subset_seed: draws the subset. Raises InputError and
    WorkspaceError.
    """
    path = find_list_path(root, split, subset, subset_seed)
    create_file_once(path, lambda temporary: _write_list(root, split, subset, subset_seed, temporary))
    return read_list(path, split, subset)


def find_list_path(root: Path, split: str, subset: int | None, seed: int) -> Path:
    """The path of the list, which may not exist yet: next to `root`, or in the user's cache if the
    folder that contains `root` is not writable."""
    # Not inside `root`, because `root` may be a link to a folder of other users.
    return choose_writable_path(root.with_name(make_list_file_name(root, split, subset, seed)))


def make_list_file_name(root: Path, split: str, subset: int | None, seed: int) -> str:
    """The file name of a list. It contains everything that decides the content of the list."""
    subset_suffix = f"-{subset}-seed-{seed}" if subset else ""
    return f"{root.name}-{split}{subset_suffix}.list"


def read_list(path: Path, split: str, subset: int | None) -> ImageList:
    """Read a list and check every line. Raises InputError with the file and the line of the first error."""
    with files.as_workspace_error("read the list of images"):
        lines = path.read_bytes().splitlines()
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=ListHeader)
    except DECODE_FAULTS as error:
        raise InputError(
            f"{path}:1: is not the header of an image list: {error}. Delete the file; the next run makes it again."
        ) from None
    if (
        header.schema != SCHEMA
        or header.split != split
        or header.images != len(lines) - 1
        or header.images != (subset or header.found)
    ):
        raise InputError(
            f"{path}: its first line does not match the lines after it, or the split and subset of this run. Delete "
            "the file; the next run makes it again."
        )
    decoder = msgspec.json.Decoder(ImageEntry)
    entries = []
    for line_number, line in enumerate(lines[1:], start=2):
        try:
            image_entry = decoder.decode(line)
        except DECODE_FAULTS as error:
            raise InputError(f"{path}:{line_number}: is not an entry of an image list: {error}.") from None
        path_parts = image_entry.path.split("/")
        if (
            not 0 <= image_entry.label < header.classes
            or len(path_parts) != 3
            or path_parts[0] != split
            or not set(path_parts).isdisjoint({"", ".", ".."})
        ):
            allowed_text = f"{split}/CLASS/FILE, 0 to {header.classes - 1}"
            raise InputError(
                f"{path}:{line_number}: found {image_entry.path!r} of class {image_entry.label}. Allowed: {allowed_text}."
            )
        entries.append(image_entry)
    return ImageList(header, entries, hashlib.sha256(b"\n".join(lines)).hexdigest())


def list_class_names(root: Path) -> list[str]:
    """The sorted names of the folders in `root/train`. The number of a class is the position of its folder in this list.

    Raises InputError if there are fewer than 2 classes.
    """
    names = sorted(entry.name for entry in _scan_folder(root / "train") if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise InputError(
            f"{root / 'train'}: found {len(names)} class folders. Allowed: at least 2, one per class, named by its wnid."
        )
    return names


def _write_list(root: Path, split: str, subset: int | None, seed: int, path: Path) -> None:
    class_names = list_class_names(root)
    labelled_paths = [
        (name, label) for label, folder in enumerate(class_names) for name in _list_image_paths(root, split, folder)
    ]
    unknown_classes = {
        entry.name for entry in _scan_folder(root / split) if entry.is_dir() and not entry.name.startswith(".")
    } - set(class_names)
    if unknown_classes:
        raise InputError(
            f"{root / split / min(unknown_classes)}: is not a class of {root / 'train'}. Allowed: its "
            f"{len(class_names)} folders."
        )
    if not labelled_paths:
        raise InputError(f"{root / split}: found no image. Allowed: CLASS/*.JPEG, as in the official archive.")
    listed_images = (
        labelled_paths
        if subset is None
        else [labelled_paths[i] for i in draw_subset(len(labelled_paths), subset, seed, str(root / split))]
    )
    header = ListHeader(
        SCHEMA, split, len(class_names), len(labelled_paths), len(listed_images), None if subset is None else seed
    )
    with files.as_workspace_error("read the data set"), ThreadPoolExecutor(8) as threads:
        digests = threads.map(files.compute_file_sha256, [root / name for name, _ in listed_images])
        entries = [ImageEntry(name, label, digest) for (name, label), digest in zip(listed_images, digests, strict=True)]
    files.write_atomic(path, b"".join(msgspec.json.encode(line) + b"\n" for line in [header, *entries]))


def _list_image_paths(root: Path, split: str, class_name: str) -> list[str]:
    class_folder = root / split / class_name
    if split != "train" and not class_folder.is_dir():
        return []  # a validation split may have no images of some classes
    return [
        f"{split}/{class_name}/{name}"
        for name in sorted(e.name for e in _scan_folder(class_folder) if e.name.lower().endswith(JPEG_SUFFIXES))
    ]


def _scan_folder(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        raise InputError(f"{folder}: no such folder. Allowed: train/CLASS/*.JPEG and val/CLASS/*.JPEG.") from None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read the data set") from error
