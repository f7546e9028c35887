"""The files that belong to each data set. An archive with any other file is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardlab.errors import InputError
from shardlab.files import image_files

IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG")  # first bytes of JPEG and PNG; a few official .JPEG files of ImageNet are PNG


@dataclass(frozen=True)
class DataSetFormat:
    """The form of a data set: its folder in the data path, and the names, number and size of the files in its archive."""

    folder: str
    member_re: re.Pattern[str]
    """Matches the whole path of a member of the archive; its group `kept` is the path within `folder`."""
    allowed_members: str
    """The allowed members, in words for an error message."""
    most_files: int
    most_bytes: int
    check_folder: Callable[[Path], None]
    """Raises InputError if a folder does not contain the data set."""
    summarize_folder: Callable[[Path], dict[str, int]]
    """Returns values that do not change as long as the folder is undamaged."""
    is_linked: bool = False
    """Whether a symbolic link to an unpacked folder is made, instead of a copy of the folder."""
    part_names: tuple[str, ...] = ()
    """The parts of the data set, each of which may come as a tar file of its own."""


def _check_cifar10(folder: Path) -> None:
    for file_name in (file_name for file_names in image_files.CIFAR10_FILES.values() for file_name in file_names):
        image_files.read_cifar10_records(folder / file_name)


def _check_mnist(folder: Path) -> None:
    for split in image_files.MNIST_FILES:
        image_files.read_mnist(folder, split)


def _check_imagenet(folder: Path) -> None:
    """Check that `train` and `val` have class folders, that every class of `val` is a class of `train`, and that the first file
    of each class folder is an image. Raises InputError."""
    classes = {split: _list_folders(folder / split) for split in ("train", "val")}
    if len(classes["train"]) < 2:
        raise InputError(f"{folder / 'train'}: found {len(classes['train'])} class folders. Allowed: at least 2.")
    if not classes["val"]:
        raise InputError(f"{folder / 'val'}: found no class folders. Allowed: val/WNID/*.JPEG; the official archive is flat.")
    if unknown_classes := set(classes["val"]) - set(classes["train"]):
        raise InputError(
            f"{folder / 'val' / min(unknown_classes)}: is no class of train. Allowed: its {len(classes['train'])} folders."
        )
    for split, class_names in classes.items():
        for class_name in class_names:
            with os.scandir(folder / split / class_name) as image_entries:
                first_image = next(
                    (entry.path for entry in image_entries if entry.name.lower().endswith((".jpeg", ".jpg"))), None
                )
            if first_image is None:
                raise InputError(f"{folder / split / class_name}: found no image. Allowed: *.JPEG.")
            with Path(first_image).open("rb") as image_file:
                check_image_start(first_image, image_file.read(4))


def check_image_start(image_name: str, first_bytes: bytes) -> None:
    """Check the first bytes of an image. Raises InputError if no image begins with them. image_name: for the error."""
    if not first_bytes.startswith(IMAGE_STARTS):
        raise InputError(f"{image_name}: starts with {first_bytes[:4].hex(' ') or 'nothing'}. Allowed: a JPEG.")


def _list_folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as folder_entries:
            return sorted(entry.name for entry in folder_entries if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        raise InputError(f"{folder}: no such folder. Allowed: train/WNID/*.JPEG and val/WNID/*.JPEG.") from None


def _read_file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def _count_classes(folder: Path) -> dict[str, int]:
    return {split: len(_list_folders(folder / split)) for split in ("train", "val")}


FORMATS = {
    "cifar10": DataSetFormat(
        folder="cifar-10-batches-bin",
        member_re=re.compile(
            r"(cifar-10-batches-bin/)?(?P<kept>(data_batch_[1-5]|test_batch)\.bin|batches\.meta\.txt|readme\.html)"
        ),
        allowed_members="cifar-10-batches-bin/ with data_batch_1.bin to data_batch_5.bin, test_batch.bin, "
        "batches.meta.txt, readme.html",
        most_files=16,
        most_bytes=256 * 2**20,
        check_folder=_check_cifar10,
        summarize_folder=_read_file_sizes,
    ),
    "mnist": DataSetFormat(
        folder="mnist",
        member_re=re.compile(r"([A-Za-z0-9_-]+/)*(?P<kept>(train|t10k)-(images-idx3|labels-idx1)-ubyte(\.gz)?)"),
        allowed_members="{train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz",
        most_files=16,
        most_bytes=128 * 2**20,
        check_folder=_check_mnist,
        summarize_folder=_read_file_sizes,
    ),
    "imagenet": DataSetFormat(
        folder="imagenet",
        member_re=re.compile(r"([A-Za-z0-9_-]+/)?(?P<kept>(train|val)/[A-Za-z0-9_]+/[A-Za-z0-9_]+\.(JPEG|jpeg|JPG|jpg))"),
        allowed_members="train/WNID/*.JPEG and val/WNID/*.JPEG",
        most_files=2_000_000,
        most_bytes=400 * 2**30,
        check_folder=_check_imagenet,
        summarize_folder=_count_classes,
        is_linked=True,
        part_names=("train", "val"),
    ),
}
