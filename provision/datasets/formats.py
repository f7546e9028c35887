"""The files that belong to each data set. An archive with any other file is refused."""

from __future__ import annotations

import gzip
import os
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardlab.errors import InputError

CIFAR10_RECORD_BYTES = 1 + 3 * 32 * 32
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
MNIST_PAIRS = (("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"))
MNIST_PIXELS = (28, 28)
LABEL_COUNT = 10
IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG")  # first bytes of JPEG and PNG; a few official .JPEG files of ImageNet are PNG


@dataclass(frozen=True)
class Format:
    """The form of a data set: its folder in the data path, and the names, number and size of the files in its archive."""

    folder: str
    member: re.Pattern[str]
    """Matches the whole path of a member of the archive; its group `kept` is the path within `folder`."""
    allowed_members: str
    """The allowed members, in words for an error message."""
    most_files: int
    most_bytes: int
    check: Callable[[Path], None]
    """Raises InputError if a folder does not contain the data set."""
    summary: Callable[[Path], dict[str, int]]
    """Returns values that do not change as long as the folder is undamaged."""
    linked: bool = False
    """Whether a symbolic link to an unpacked folder is made, instead of a copy of the folder."""
    parts: tuple[str, ...] = ()
    """The parts of the data set, each of which may come as a tar file of its own."""


def _check_cifar10(folder: Path) -> None:
    for name in CIFAR10_FILES:
        file_bytes = _read_content(folder / name, most_bytes=FORMATS["cifar10"].most_bytes)
        if not file_bytes or len(file_bytes) % CIFAR10_RECORD_BYTES:
            raise InputError(
                f"{folder / name}: found {len(file_bytes)} bytes. Allowed: a multiple of {CIFAR10_RECORD_BYTES}, one record."
            )
        _check_labels(folder / name, file_bytes[::CIFAR10_RECORD_BYTES])


def _check_mnist(folder: Path) -> None:
    for images_name, labels_name in MNIST_PAIRS:
        _, shape = _read_idx(folder, images_name, 3)
        labels, _ = _read_idx(folder, labels_name, 1)
        if shape[1:] != MNIST_PIXELS:
            raise InputError(f"{folder / images_name}: found images of {shape[1]} x {shape[2]} pixels. Allowed: 28 x 28.")
        if shape[0] != len(labels):
            raise InputError(f"{folder / labels_name}: found {len(labels)} labels. Allowed: {shape[0]}, one for each image.")
        _check_labels(folder / labels_name, labels)


def _read_idx(folder: Path, file_name: str, dimension_count: int) -> tuple[bytes, tuple[int, ...]]:
    path = folder / file_name if (folder / file_name).exists() else folder / f"{file_name}.gz"
    idx_bytes = _read_content(path, most_bytes=FORMATS["mnist"].most_bytes)
    begin = 4 + 4 * dimension_count
    magic = bytes([0, 0, 8, dimension_count])
    if idx_bytes[:4] != magic or len(idx_bytes) < begin:
        raise InputError(f"{path}: starts with {idx_bytes[:4].hex(' ')}. Allowed: {magic.hex(' ')}, IDX of unsigned bytes.")
    shape = struct.unpack(f">{dimension_count}I", idx_bytes[4:begin])
    promised_bytes = 1
    for dimension_size in shape:
        promised_bytes *= dimension_size
    if not promised_bytes or promised_bytes != len(idx_bytes) - begin:
        raise InputError(f"{path}: found {len(idx_bytes) - begin} bytes after the header, which promises {promised_bytes}.")
    return idx_bytes[begin:], shape


def _read_content(path: Path, *, most_bytes: int) -> bytes:
    """The bytes of a file, decompressed if its name ends with .gz. most_bytes: the largest allowed number of bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened_file:
            file_bytes: bytes = opened_file.read(most_bytes + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: is not a whole gzip file: {error}.") from None
    if len(file_bytes) > most_bytes:
        raise InputError(f"{path}: holds more than {most_bytes} bytes, the most that this set may have.")
    return file_bytes


def _check_labels(path: Path, labels: bytes) -> None:
    if max(labels) >= LABEL_COUNT:
        first = next(index for index, label in enumerate(labels) if label >= LABEL_COUNT)
        raise InputError(f"{path}: record {first} has the label {labels[first]}. Allowed: 0 to {LABEL_COUNT - 1}.")


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


def _file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def _count_classes(folder: Path) -> dict[str, int]:
    return {split: len(_list_folders(folder / split)) for split in ("train", "val")}


FORMATS = {
    "cifar10": Format(
        folder="cifar-10-batches-bin",
        member=re.compile(
            r"(cifar-10-batches-bin/)?(?P<kept>(data_batch_[1-5]|test_batch)\.bin|batches\.meta\.txt|readme\.html)"
        ),
        allowed_members="cifar-10-batches-bin/ with data_batch_1.bin to data_batch_5.bin, test_batch.bin, "
        "batches.meta.txt, readme.html",
        most_files=16,
        most_bytes=256 * 2**20,
        check=_check_cifar10,
        summary=_file_sizes,
    ),
    "mnist": Format(
        folder="mnist",
        member=re.compile(r"([A-Za-z0-9_-]+/)*(?P<kept>(train|t10k)-(images-idx3|labels-idx1)-ubyte(\.gz)?)"),
        allowed_members="{train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz",
        most_files=16,
        most_bytes=128 * 2**20,
        check=_check_mnist,
        summary=_file_sizes,
    ),
    "imagenet": Format(
        folder="imagenet",
        member=re.compile(r"([A-Za-z0-9_-]+/)?(?P<kept>(train|val)/[A-Za-z0-9_]+/[A-Za-z0-9_]+\.(JPEG|jpeg|JPG|jpg))"),
        allowed_members="train/WNID/*.JPEG and val/WNID/*.JPEG",
        most_files=2_000_000,
        most_bytes=400 * 2**30,
        check=_check_imagenet,
        summary=_count_classes,
        linked=True,
        parts=("train", "val"),
    ),
}
