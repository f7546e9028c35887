"""Reads MNIST from its official IDX files, unpacked or as they are published (.gz). The whole set is kept in memory.

A file has two zero bytes, the type (8: unsigned bytes), the number of dimensions, each dimension as a big-endian 32-bit
number, and the data bytes. The grey plane is repeated three times, for networks with three colours. If the model needs 28 x 28
pixels, the images are not changed. Otherwise they get two black pixels on each side (32 x 32), and are then resized bilinearly
if the model needs another size than 32.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from shardlab.errors import InputError, WorkspaceError
from trainers.data.data_sets import DataSource
from trainers.data.images import ImageSet, resize_images

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CLASSES, SIDE, FRAME = 10, 28, 2
UNSIGNED_BYTES = 8
MOST_BYTES = 2**30  # the official training set has 47 MB; a file with more bytes than this is damaged or an attack
MEAN, STD = 0.1307, 0.3081  # mean and deviation of all pixels of the official training set, with pixels from 0 to 1


class Mnist(ImageSet):
    """The images of one split, from its file of images and its file of labels."""

    class_count = CLASSES

    def __init__(self, folder: Path, split: str, size: int) -> None:
        """Raises InputError with the file if images do not have 28 x 28 pixels, or if there is not one label below 10 for each
        image."""
        images_file, labels_file = (_find_file(folder, name) for name in FILES[split])
        self._pixels, self._labels = read_idx(images_file, 3), read_idx(labels_file, 1)
        if self._pixels.shape[1:] != (SIDE, SIDE):
            pixels = " x ".join(map(str, self._pixels.shape[1:]))
            raise InputError(f"{images_file}: found images of {pixels} pixels. Allowed: {SIDE} x {SIDE}.")
        if len(self._pixels) != len(self._labels):
            raise InputError(
                f"{labels_file}: found {len(self._labels)} labels. Allowed: one for each of {len(self._pixels)} images."
            )
        if (wrong_labels := np.flatnonzero(self._labels >= CLASSES)).size:
            first_wrong = int(wrong_labels[0])
            raise InputError(f"{labels_file}: label {first_wrong} is {self._labels[first_wrong]}. Allowed: 0 to {CLASSES - 1}.")
        self._size = size
        size_note = {SIDE: "", SIDE + 2 * FRAME: " framed to 32 x 32"}.get(
            size, f" framed to 32 x 32, resized to {size} x {size}"
        )
        self.source = DataSource(
            name=f"MNIST, grey in three colours{size_note}",
            sha256=hashlib.sha256(self._pixels.tobytes() + self._labels.tobytes()).hexdigest(),
            synthetic=False,
            items=len(self._labels),
        )

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pixels = self._pixels[indices, None]
        if self._size != SIDE:
            pixels = np.pad(pixels, ((0, 0), (0, 0), (FRAME, FRAME), (FRAME, FRAME)))
        scaled = resize_images((pixels * np.float32(1 / 255) - np.float32(MEAN)) / np.float32(STD), self._size)
        return np.repeat(scaled, 3, axis=1), self._labels[indices].astype(np.int64)


def read_idx(path: Path, dimension_count: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes into an array with this number of dimensions.

    Raises InputError for a wrong header before memory for the data is allocated.
    """
    try:
        with _open_unpacked(path) as idx_file:
            header = idx_file.read(4 + 4 * dimension_count)
            magic = bytes([0, 0, UNSIGNED_BYTES, dimension_count])
            if header[:4] != magic or len(header) < 4 + 4 * dimension_count:
                raise InputError(
                    f"{path}: starts with {header[:4].hex(' ')}. Allowed: {magic.hex(' ')}, IDX of unsigned bytes."
                )
            shape = struct.unpack(f">{dimension_count}I", header[4:])
            byte_count = 1
            for size in shape:
                byte_count *= size  # Python's integers do not overflow; NumPy's integers would
            if not 0 < byte_count <= MOST_BYTES:
                raise InputError(f"{path}: its header announces {byte_count} bytes. Allowed: 1 to {MOST_BYTES}.")
            if path.suffix != ".gz" and path.stat().st_size != len(header) + byte_count:
                raise _make_wrong_size_error(path, path.stat().st_size - len(header), byte_count)
            # one byte more than the header announces, to notice a file that is too long
            content = idx_file.read(byte_count + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: the gzip file is damaged or incomplete: {error}.") from None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read the data set") from error
    if len(content) != byte_count:
        raise _make_wrong_size_error(path, len(content), byte_count)
    return np.frombuffer(content, np.uint8).reshape(shape)


def _make_wrong_size_error(path: Path, actual_bytes: int, promised_bytes: int) -> InputError:
    found_text = f"found more than {promised_bytes}" if actual_bytes > promised_bytes else f"found {actual_bytes}"
    return InputError(
        f"{path}: {found_text} bytes after the header. Allowed: {promised_bytes}, by the dimensions in its header."
    )


def _open_unpacked(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _find_file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise InputError(f"{folder / name}: no such file, and no {name}.gz. Allowed: a folder with the four files of MNIST.")
