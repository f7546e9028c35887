"""Reads and checks the official files of MNIST (IDX) and of CIFAR-10 (binary version).

An IDX file has two zero bytes, the type (8: unsigned bytes), the number of dimensions, each dimension as a big-endian 32-bit
number, and the data bytes; it may be compressed (.gz). A record of CIFAR-10 is 1 byte with the label (0 to 9) and 3,072 bytes
of pixels: the red, green and blue planes of 32 rows with 32 pixels.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from shardlab.errors import InputError

CIFAR10_FILES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "validation": ("test_batch.bin",)}
CIFAR10_RECORD_BYTES = 1 + 3 * 32 * 32
MNIST_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
MNIST_PIXELS = (28, 28)
LABEL_COUNT = 10
UNSIGNED_BYTES = 8
MOST_BYTES = 2**28  # the largest official file has 47 MB; a file with more bytes than this is damaged or an attack


def read_cifar10_records(path: Path) -> bytes:
    """The records of a file of CIFAR-10. Raises InputError if it has not a number of whole records with labels below 10, and
    OSError if it cannot be read."""
    try:
        with path.open("rb") as record_file:
            records = record_file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        file_names = [name for split_names in CIFAR10_FILES.values() for name in split_names]
        raise InputError(f"{path}: no such file. Allowed: a folder with {', '.join(file_names)}.") from None
    if not 0 < len(records) <= MOST_BYTES or len(records) % CIFAR10_RECORD_BYTES:
        raise InputError(
            f"{path}: found {len(records)} bytes. Allowed: a multiple of {CIFAR10_RECORD_BYTES}, the size of a record, and at "
            f"most {MOST_BYTES}."
        )
    _check_labels(path, records[::CIFAR10_RECORD_BYTES])
    return records


def read_mnist(folder: Path, split: str) -> tuple[bytes, bytes]:
    """Returns (the pixels of the images, 28 x 28 bytes each, their labels) of one split of MNIST, `train` or `validation`.

    Raises InputError with the file if images have other sizes, or if there is not one label below 10 for each image. Raises
    OSError if a file cannot be read."""
    images_file, labels_file = (_find_mnist_file(folder, name) for name in MNIST_FILES[split])
    (pixel_bytes, image_shape), (label_bytes, _) = read_idx(images_file, 3), read_idx(labels_file, 1)
    if image_shape[1:] != MNIST_PIXELS:
        raise InputError(f"{images_file}: found images of {image_shape[1]} x {image_shape[2]} pixels. Allowed: 28 x 28.")
    if image_shape[0] != len(label_bytes):
        raise InputError(f"{labels_file}: found {len(label_bytes)} labels. Allowed: {image_shape[0]}, one for each image.")
    _check_labels(labels_file, label_bytes)
    return pixel_bytes, label_bytes


def read_idx(path: Path, dimension_count: int) -> tuple[bytes, tuple[int, ...]]:
    """Returns (the data bytes of an IDX file of unsigned bytes, its dimensions).

    Raises InputError for a wrong header before memory for the data is allocated, and OSError if the file cannot be read.
    """
    expected_start = bytes([0, 0, UNSIGNED_BYTES, dimension_count])
    try:
        with cast("BinaryIO", gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as idx_file:
            header = idx_file.read(4 + 4 * dimension_count)
            if header[:4] != expected_start or len(header) < 4 + 4 * dimension_count:
                raise InputError(
                    f"{path}: starts with {header[:4].hex(' ')}. Allowed: {expected_start.hex(' ')}, IDX of unsigned bytes."
                )
            dimensions = struct.unpack(f">{dimension_count}I", header[4:])
            if not 0 < (byte_count := math.prod(dimensions)) <= MOST_BYTES:
                raise InputError(f"{path}: its header announces {byte_count} bytes. Allowed: 1 to {MOST_BYTES}.")
            data_bytes = idx_file.read(byte_count + 1)  # one byte more, to notice a file that is too long
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: the gzip file is damaged or incomplete: {error}.") from None
    if len(data_bytes) != byte_count:
        count_text = f"more than {byte_count}" if len(data_bytes) > byte_count else str(len(data_bytes))
        raise InputError(
            f"{path}: found {count_text} bytes after the header. Allowed: {byte_count}, by the dimensions in its header."
        )
    return data_bytes, dimensions


def _check_labels(path: Path, label_bytes: bytes) -> None:
    if max(label_bytes) >= LABEL_COUNT:
        position = next(index for index, label in enumerate(label_bytes) if label >= LABEL_COUNT)
        raise InputError(f"{path}: record {position} has the label {label_bytes[position]}. Allowed: 0 to {LABEL_COUNT - 1}.")


def _find_mnist_file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise InputError(f"{folder / name}: no such file, and no {name}.gz. Allowed: a folder with the four files of MNIST.")
