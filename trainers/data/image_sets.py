"""Opens a set of labelled images by its name, so that workloads do not depend on a particular set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.errors import InputError, UnknownName
from trainers.data import synthetic_images
from trainers.data.cifar10 import Cifar10
from trainers.data.data_sets import FOLDER_BY_DATA_SET, IMAGE_DATA_SETS, SPLITS, make_missing_files_error
from trainers.data.imagenet import ImageFolders
from trainers.data.images import Subset
from trainers.data.mnist import Mnist

if TYPE_CHECKING:
    from trainers.data.images import ImageSet

SMALL_SETS = {"cifar10": Cifar10, "mnist": Mnist}  # sets that are read into memory as a whole


def open_images(
    name: str, data_path: Path, split: str, *, image_size: int, class_count: int | None, subset: int | None, subset_seed: int
) -> ImageSet:
    """Open one split of a data set. Its images have size x size pixels and three colours.

    name: the data set, one of IMAGE_DATA_SETS.
    split: `train` or `validation`.
    class_count: number of classes of the synthetic set (None: 10). Sets in files have their own number (`ImageSet.classes`).
    subset: number of images of the training split, which are drawn by `subset_seed`; for the synthetic set, its number of
        images. None: all images. The validation split always has all its images.

    Raises InputError if files are missing or damaged, or if the set has fewer images than `subset`, and WorkspaceError.
    """
    if name not in IMAGE_DATA_SETS:
        raise UnknownName("data set", name, IMAGE_DATA_SETS)
    if split not in SPLITS:
        raise UnknownName("split", split, SPLITS)
    if image_size < 1 or (subset is not None and subset < 1):
        raise InputError(f"{name}: found the size {image_size} and the subset {subset}. Allowed: at least 1.")
    if not 0 <= subset_seed < 2**63:
        raise InputError(f"subset_seed: found {subset_seed}. Allowed: 0 to {2**63 - 1}.")
    drawn_subset = subset if split == "train" else None
    if name == "synthetic":
        return synthetic_images.SyntheticImages(split, image_size, class_count or synthetic_images.CLASS_COUNT, drawn_subset)
    folder = data_path / FOLDER_BY_DATA_SET[name]
    if not folder.is_dir():
        raise make_missing_files_error(name, folder)
    if name == "imagenet":
        return ImageFolders(folder, split, image_size, drawn_subset, subset_seed)
    full_split = SMALL_SETS[name](folder, split, image_size)
    return full_split if drawn_subset is None else Subset(full_split, drawn_subset, subset_seed)
