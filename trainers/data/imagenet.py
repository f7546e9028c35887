"""Reads ImageNet, or any set of class folders with JPEG files. Images are decoded during training: the set is too large for
memory.

The files are `imagenet/train/WNID/*.JPEG` and `imagenet/val/WNID/*.JPEG` in the data path. An image is scaled so that its
shorter side has size * 256 / 224 pixels (bilinear), its centre of size x size pixels is cut out, and the pixels are normalised.
There is no augmentation, so that every strategy and every epoch gets the same values.
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
from trainers.data import image_list
from trainers.data.data_sets import DataSource
from trainers.data.images import ImageSet

SPLIT_FOLDERS = {"train": "train", "validation": "val"}
MARGIN = 256 / 224  # length of the image's shorter side / side of the square that is cut out
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # per channel of the training set, with pixels from 0 to 1
MOST_PIXELS = 2**27  # twice the largest image of the official set; a larger image is damaged or an attack
MOST_THREADS = 8


class ImageFolders(ImageSet):
    """The images of one split in its class folders. Each time an image is read, its checksum is compared with the list."""

    def __init__(self, root: Path, split: str, size: int, subset: int | None, subset_seed: int) -> None:
        """Raises InputError with the file or folder that is missing or damaged."""
        listing = image_list.ensure_image_list(root, SPLIT_FOLDERS[split], subset, subset_seed)
        self.class_count = listing.header.classes
        self._root, self._size, self._entries = root, size, listing.entries
        subset_text = "" if subset is None else f", {subset} images by seed {subset_seed}"
        self.source = DataSource(
            name=f"ImageNet, {size} x {size}{subset_text}", sha256=listing.sha256, synthetic=False, items=len(listing.entries)
        )
        self._pool: ThreadPoolExecutor | None = None

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        image_entries = [self._entries[int(index)] for index in indices]
        images = np.empty((len(image_entries), 3, self._size, self._size), np.float32)
        if self._pool is None:  # made at the first use: a process that is forked later would inherit a pool without threads
            self._pool = ThreadPoolExecutor(count_decoding_threads())
        for _ in self._pool.map(self._decode_into, images, image_entries):
            pass  # iterating over the results raises the exception of a thread
        return images, np.array([entry.label for entry in image_entries], np.int64)

    def _decode_into(self, image: np.ndarray, entry: image_list.ImageEntry) -> None:
        path = self._root / entry.path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "read the image") from error
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise InputError(f"{path}: the file changed after the image list was made (SHA-256 differs).")
        decode_image(content, path, self._size, image)


def decode_image(file_content: bytes, path: Path, image_size: int, image: np.ndarray) -> None:
    """Decode, scale and normalise an image into `image`, (3, size, size) in float32.

    file_content: the bytes of the file. path: the file, for the message of an InputError.
    """
    try:
        with Image.open(io.BytesIO(file_content), formats=("JPEG", "PNG")) as photo:  # a few official .JPEG files are PNG
            if photo.width * photo.height > MOST_PIXELS:
                raise InputError(f"{path}: found {photo.width} x {photo.height} pixels. Allowed: at most {MOST_PIXELS}.")
            side = min(photo.size) / MARGIN
            # The JPEG decoder is faster if it may decode to a smaller image, which has at least twice the needed size.
            photo.draft("RGB", (round(2 * photo.width * image_size / side), round(2 * photo.height * image_size / side)))
            rgb_image = photo.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"{path}: the image is damaged or incomplete: {error}.") from None
    side = min(rgb_image.size) / MARGIN
    left, top = (rgb_image.width - side) / 2, (rgb_image.height - side) / 2
    # Only the square is scaled. The result is the same as if the whole image were scaled and the square were then cut out.
    cut_image = rgb_image.resize((image_size, image_size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (MEAN, STD))
    np.multiply(np.asarray(cut_image).transpose(2, 0, 1), 1 / (255 * std), out=image)
    image -= mean / std


def count_decoding_threads() -> int:
    """The number of threads with which a rank decodes images: its share of the processors that this process may use, at most 8.

    The processors are shared among the ranks of this host (LOCAL_WORLD_SIZE).
    """
    ranks_on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks_on_host))
