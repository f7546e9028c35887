"""CIFAR-10 in its official binary format, and a small stand-in in the same format where the archive is not there.

A record is 1 byte of label (0 to 9) and 3,072 bytes of pixels: the red, green and blue plane of 32 rows of 32. The
archive is https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz; unpack it in the data folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab import files
from shardlab.errors import InputError, WorkspaceError
from trainers.data.once import make_once

if TYPE_CHECKING:
    import numpy as np

OFFICIAL, STAND_IN = "cifar-10-batches-bin", "synthetic-cifar-10"
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
CLASSES, SHAPE = 10, (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # per channel of the official training set, pixels in 0..1


class Images:
    """Labels (n,) and pixels (n, 3, 32, 32), both uint8, of some files of a folder in the official format."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Raises InputError, naming the file, for anything that is not whole records with labels below 10."""
        import numpy as np

        records = np.concatenate([_records(folder / name) for name in names])
        self.labels: np.ndarray = records[:, 0]
        self.pixels: np.ndarray = records[:, 1:].reshape(-1, *SHAPE)
        self.sha256 = hashlib.sha256(records.data).hexdigest()

    def normalised(self, indices: np.ndarray) -> np.ndarray:
        """The images with these indices, (n, 3, 32, 32) in float32, with about mean 0 and deviation 1 per channel."""
        import numpy as np

        mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (MEAN, STD))
        scaled: np.ndarray = (self.pixels[indices].astype(np.float32) / 255 - mean) / std
        return scaled


def folder_in(data_path: Path) -> tuple[Path, bool]:
    """(the folder to read, whether it is the stand-in). The stand-in is made if neither is there. Raises WorkspaceError."""
    official = data_path / OFFICIAL
    if official.exists():
        return official, False
    stand_in = data_path / STAND_IN
    make_once(stand_in, _make_stand_in)
    return stand_in, True


def _records(path: Path) -> np.ndarray:
    import numpy as np

    try:
        raw = np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; the archive's folder has {', '.join((*TRAIN, *TEST))}.") from None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read the data set") from error
    if len(raw) == 0 or len(raw) % RECORD_BYTES:
        raise InputError(f"{path}: found {len(raw)} bytes. Allowed: a multiple of {RECORD_BYTES}, the size of a record.")
    records = raw.reshape(-1, RECORD_BYTES)
    if (wrong := np.flatnonzero(records[:, 0] >= CLASSES)).size:
        first = int(wrong[0])
        raise InputError(f"{path}: record {first} has the label {records[first, 0]}. Allowed: 0 to {CLASSES - 1}.")
    return records


def _make_stand_in(folder: Path) -> None:
    """2,000 images to train and 500 to test: a coarse pattern per class under noise, so that there is something to learn."""
    import numpy as np

    generator = np.random.default_rng(10)
    coarse = generator.integers(64, 192, size=(CLASSES, 3, 4, 4))
    patterns = np.kron(coarse, np.ones((1, 1, 8, 8), dtype=np.int64))
    files.make_folder(folder)
    for name, images in [(name, 400) for name in TRAIN] + [(TEST[0], 500)]:
        labels = generator.integers(0, CLASSES, size=images)
        pixels = np.clip(patterns[labels] + generator.integers(-48, 49, size=(images, *SHAPE)), 0, 255)
        records = np.concatenate([labels[:, None], pixels.reshape(images, -1)], axis=1).astype(np.uint8)
        files.write_atomic(folder / name, records.tobytes())
