"""Imports torchvision, even if its compiled operators cannot be loaded because torch was built without CUDA.

The compiled part of the published wheel needs libtorch_cuda. Without this library, `import torchvision` fails ("operator
torchvision::nms does not exist"). Every import of transformers' models fails too, because transformers imports torchvision.
No image classifier uses these operators, so it is enough to define their names.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import cast

import torch


@functools.cache
def import_torchvision() -> ModuleType:
    """Import torchvision in a way that works with this build of torch, and return it. Must be called before any model of
    transformers is imported."""
    package_spec = importlib.util.find_spec("torchvision")  # finds the package without importing it
    assert package_spec is not None, "torchvision is installed with trainers"
    package_folder = Path(next(iter(package_spec.submodule_search_locations or [])))
    try:
        (library,) = package_folder.glob("_C*.so")  # `_C.so` up to torchvision 0.28, `_C_stable.so` from 0.29 on
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (OSError, ValueError):
        _name_operators()
    import torchvision

    return cast("ModuleType", torchvision)


@functools.cache
def _name_operators() -> object:
    """Define the names of the operators. The names exist as long as the returned object, which the cache of this function
    keeps."""
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library
