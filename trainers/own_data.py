"""Data sets for the model files of users: in such a file, `DATA = token_file(...)` replaces the function `batch` and `ITEMS`.

The content of an item depends only on the item's number. The items of a step depend only on the seed of the cell, so every
strategy trains on the same items in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch

from shardlab.errors import InputError
from trainers.data.data_sets import DataSource
from trainers.data.imagenet import ImageFolders
from trainers.data.token_sets import FileTokens


class OwnData(msgspec.Struct, frozen=True):
    """A data set for a user's model file."""

    source: DataSource
    """The name of the data set, the SHA-256 of its content, and the number of its items."""
    batch: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Gets the numbers of items, (n,), and returns their (inputs, targets) on the CPU."""
    classes: int | None
    """The number of classes if targets are classes, so that every target is smaller than this number; otherwise None."""
    units_per_item: int
    """Units of throughput in one item: the number of tokens of a sequence, otherwise 1."""


def token_file(path: str, seq_len: int) -> OwnData:
    """The training sequences of a file that `python -m trainers tokenize` wrote. Inputs and targets are (n, seq_len) in int64.

    The last tenth of the file is left out, because it is the validation split. path: an absolute path, or a path with ~. Raises
    InputError.
    """
    if seq_len < 1:
        raise InputError(f"{path}: found the sequence length {seq_len}. Allowed: from 1.")
    tokens = FileTokens(_require_absolute_path(path), "train", seq_len, None)

    def batch(items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sequences = torch.from_numpy(tokens.read(items.numpy()))
        return sequences[:, :-1], sequences[:, 1:]

    return OwnData(tokens.source, batch, tokens.vocabulary, seq_len)


def image_folder(path: str, size: int) -> OwnData:
    """The images in the folders `train/CLASS/` of a folder (JPEG files, `.jpg` or `.jpeg`).

    Inputs are (n, 3, size, size) in float32, targets (n,) in int64. The first process that opens the folder reads every image
    once, to compute the checksum. path: absolute, or with ~. size: width and height in pixels. Raises InputError and
    WorkspaceError.
    """
    if size < 1:
        raise InputError(f"{path}: found the size {size}. Allowed: from 1.")
    root = _require_absolute_path(path)
    images = ImageFolders(root, "train", size, None, 0)

    def batch(items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, labels = images.read(items.numpy())
        return torch.from_numpy(pixels), torch.from_numpy(labels)

    source = msgspec.structs.replace(images.source, name=f"images of {root.name}, {size} x {size}")
    return OwnData(source, batch, images.class_count, 1)


def tensors(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], name: str = "tensors") -> OwnData:
    """A data set of (input, target) pairs of tensors, in the order of the iterable. All items are kept in memory.

    All inputs must have the same shape, and all targets too. name: the name of the data set in results. Raises InputError.
    """
    pair_list = list(pairs)
    if not pair_list or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pair_list):
        raise InputError(
            f"{name}: found no item, or an item that is no pair. Needed: (input, target), two tensors for each item."
        )
    try:
        inputs, targets = (torch.stack(list(part)).detach().cpu().contiguous() for part in zip(*pair_list, strict=True))
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{name}: the items are not tensors of one shape: {str(error).splitlines()[0]}") from None
    sha256 = hashlib.sha256()
    for part in (inputs, targets):
        sha256.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
        sha256.update(part.reshape(-1).view(torch.uint8).numpy().data)  # as bytes: numpy has no bfloat16
    source = DataSource(name=name, sha256=sha256.hexdigest(), synthetic=False, items=len(pair_list))
    is_class_number = not targets.is_floating_point() and targets.dtype != torch.bool
    classes = int(targets.max()) + 1 if is_class_number and targets.numel() else None
    return OwnData(source, lambda items: (inputs[items], targets[items]), classes, 1)


def _require_absolute_path(path: str) -> Path:
    absolute_path = Path(path).expanduser()
    if not absolute_path.is_absolute():
        raise InputError(
            f"{path}: the path of data has to be absolute, because ranks read it from other folders. Allowed: a path that "
            "begins with / or ~."
        )
    return absolute_path
