"""Imports torchvision even if torch was built without CUDA, so that torchvision's compiled operators cannot be loaded.

The compiled part of the published wheel needs libtorch_cuda. Without it `import torchvision` fails ("operator
torchvision::nms does not exist"), and so does every import of transformers' models, which look for torchvision first.
No classifier uses these operators; it is enough to define their names.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import cast

import torch


@functools.cache
def load() -> ModuleType:
    """torchvision, imported so that it works with this torch; before anything imports transformers' models."""
    spec = importlib.util.find_spec("torchvision")  # finds it, does not run it
    assert spec is not None, "torchvision is installed with trainers"
    folder = Path(next(iter(spec.submodule_search_locations or [])))
    try:
        (library,) = folder.glob("_C*.so")  # `_C.so` up to torchvision 0.28, `_C_stable.so` from 0.29 on
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (OSError, ValueError):
        _name_operators()
    import torchvision

    return cast("ModuleType", torchvision)


@functools.cache
def _name_operators() -> object:
    """The library that holds the names; they live as long as it is referenced, here by the cache."""
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library
