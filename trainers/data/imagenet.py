"""ImageNet, or any set of class folders of JPEGs. Images are decoded during training: the set is too large for memory.

`imagenet/train/WNID/*.JPEG` and `imagenet/val/WNID/*.JPEG` in the data path. An image is scaled so that its shorter side
has size * 256 / 224 pixels (bilinear), cut at its centre to size x size, and normalised: no augmentation, so that every
strategy and every epoch sees the same values.
"""

from __future__ import annotations

import hashlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from shardlab.errors import InputError, WorkspaceError
from trainers.data import data_sets, image_list
from trainers.data.data_sets import DataSource, not_staged
from trainers.data.images import ImageSet

FOLDER = data_sets.FOLDERS["imagenet"]
FOLDERS = {"train": "train", "validation": "val"}
MARGIN = 256 / 224  # the shorter side's length over that of the square cut from it
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # per channel of the official training set, pixels in 0..1
MOST_PIXELS = 2**27  # twice the largest of the official set; more is damage or an attack
MOST_THREADS = 8


def opened(data_path: Path, split: str, size: int, subset: int | None, subset_seed: int) -> ImageSet:
    """The split, or a subset of it. Raises InputError, naming what is missing or damaged, and WorkspaceError."""
    root = data_path / FOLDER
    if not root.is_dir():
        raise not_staged("imagenet", root)
    return ImageFolders(root, split, size, subset, subset_seed)


class ImageFolders(ImageSet):
    """The images of one split in its class folders. Every read checks the image against its checksum in the list."""

    def __init__(self, root: Path, split: str, size: int, subset: int | None, subset_seed: int) -> None:
        """Raises InputError, naming the file or folder."""
        listed = image_list.ready(root, FOLDERS[split], subset, subset_seed)
        self.classes = listed.head.classes
        self._root, self._size, self._entries = root, size, listed.entries
        drawn = "" if subset is None else f", {subset} images by seed {subset_seed}"
        self.source = DataSource(
            name=f"ImageNet, {size} x {size}{drawn}", sha256=listed.sha256, synthetic=False, items=len(listed.entries)
        )
        self._pool: ThreadPoolExecutor | None = None

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        entries = [self._entries[int(index)] for index in indices]
        images = np.empty((len(entries), 3, self._size, self._size), np.float32)
        if self._pool is None:  # at the first read, in the process that reads: a fork would inherit a pool without threads
            self._pool = ThreadPoolExecutor(threads())
        for _ in self._pool.map(self._fill, images, entries):
            pass  # an exception of a thread comes out here
        return images, np.array([entry.label for entry in entries], np.int64)

    def _fill(self, image: np.ndarray, entry: image_list.ImageEntry) -> None:
        path = self._root / entry.path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "read the image") from error
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise InputError(f"{path}: the file changed after the image list was made (SHA-256 differs).")
        decode(content, path, self._size, image)


def decode(content: bytes, path: Path, size: int, image: np.ndarray) -> None:
    """Fill `image`, (3, size, size) in float32, from the bytes of a file. Raises InputError, naming `path`."""
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as opened:  # a few official .JPEG files are PNG
            if opened.width * opened.height > MOST_PIXELS:
                raise InputError(f"{path}: found {opened.width} x {opened.height} pixels. Allowed: at most {MOST_PIXELS}.")
            side = min(opened.size) / MARGIN
            # The decoder may leave out detail that twice the scaled image would not show.
            opened.draft("RGB", (round(2 * opened.width * size / side), round(2 * opened.height * size / side)))
            colours = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"{path}: the image is damaged or incomplete: {error}.") from None
    side = min(colours.size) / MARGIN
    left, top = (colours.width - side) / 2, (colours.height - side) / 2
    # Scaling the square alone gives what scaling all and then cutting gives, without the part that is cut away.
    square = colours.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (MEAN, STD))
    np.multiply(np.asarray(square).transpose(2, 0, 1), 1 / (255 * std), out=image)
    image -= mean / std


def threads() -> int:
    """Threads of a rank: the processors that this process may use, shared among the ranks of this host, at most 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))
