"""Reads CIFAR-10 in its official binary format. The whole set is kept in memory, because it is small.

A record is 1 byte with the label (0 to 9) and 3,072 bytes of pixels: the red, green and blue planes of 32 rows with 32 pixels.
The archive is https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz; the data path contains the folder of the archive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardlab.errors import InputError, WorkspaceError
from trainers.data.data_sets import DataSource
from trainers.data.images import ImageSet, resize_images

FILES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "validation": ("test_batch.bin",)}
CLASSES, SIDE = 10, 32
RECORD_BYTES = 1 + 3 * SIDE * SIDE
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # per channel of the training set, with pixels from 0 to 1


class Cifar10(ImageSet):
    """The images of one split. They are resized bilinearly if the model needs another size than 32 pixels."""

    class_count = CLASSES

    def __init__(self, folder: Path, split: str, size: int) -> None:
        """Raises InputError with the name of a file whose content is not a number of whole records with labels below 10."""
        records = np.concatenate([_read_records(folder / name, FILES[split]) for name in FILES[split]])
        self._size = size
        self._labels = records[:, 0]
        self._pixels = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
        self.source = DataSource(
            name="CIFAR-10" if size == SIDE else f"CIFAR-10 resized to {size} x {size}",
            sha256=hashlib.sha256(records.data).hexdigest(),
            synthetic=False,
            items=len(records),
        )

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (MEAN, STD))
        scaled = (self._pixels[indices] * np.float32(1 / 255) - mean) / std
        return resize_images(scaled, self._size), self._labels[indices].astype(np.int64)


def _read_records(path: Path, file_names: Sequence[str]) -> np.ndarray:
    try:
        file_bytes = np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. Allowed: a folder with {', '.join(file_names)}.") from None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read the data set") from error
    if len(file_bytes) == 0 or len(file_bytes) % RECORD_BYTES:
        raise InputError(f"{path}: found {len(file_bytes)} bytes. Allowed: a multiple of {RECORD_BYTES}, the size of a record.")
    records = file_bytes.reshape(-1, RECORD_BYTES)
    if (wrong_records := np.flatnonzero(records[:, 0] >= CLASSES)).size:
        first_wrong_record = int(wrong_records[0])
        raise InputError(
            f"{path}: record {first_wrong_record} has the label {records[first_wrong_record, 0]}. Allowed: 0 to {CLASSES - 1}."
        )
    return records
