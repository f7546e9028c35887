"""Counts how often the host waits for a GPU: when it reads a number from a GPU, at blocking copies and at synchronizations."""

from __future__ import annotations

import collections
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ASKS = ("_local_scalar_dense", "nonzero", "equal")  # their result, or its size, depends on values in GPU memory
COPIES = ("_to_copy", "copy_")


_active: list[Waits] = []


def note(name: str) -> None:
    """Count a wait of the host for an event, a stream or a GPU. `streams` and `device` call this. name: what the host does."""
    for waits in _active:
        if waits.counting:
            waits.lines[f"{name}: {_place()}"] += 1


class Waits(TorchDispatchMode):
    """Counts waits of the host while this context is active.

    lines: the number of waits, by operator, source line and the line of the caller. counting: whether waits are counted now.
    """

    def __init__(self, *, counting: bool = True) -> None:
        super().__init__()
        self.counting = counting
        self.lines: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Any:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *ended: Any) -> Any:
        _active.remove(self)
        return super().__exit__(*ended)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        given = kwargs or {}
        name = operator._schema.name.partition("::")[2]
        if self.counting and (_asks(name, args) or _copies(name, args, given)):
            self.lines[f"{name}: {_place()}"] += 1
        return operator(*args, **given)


def _asks(name: str, args: tuple[Any, ...]) -> bool:
    return name in ASKS and any(isinstance(one, torch.Tensor) and one.device.type == "cuda" for one in args)


def _copies(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator is a copy between host and GPU that blocks the host.

    A copy blocks the host unless it has non_blocking=True and the host memory is pinned.
    """
    if name not in COPIES:
        return False
    source = args[1] if name == "copy_" else args[0]
    if name == "copy_" and source.data_ptr() == args[0].data_ptr():
        return False  # gloo returns host tensors with the memory of the fake GPU, so nothing is copied
    target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
    if {source.device.type, target.type} != {"cuda", "cpu"}:
        return False
    asked = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
    on_host = source if source.device.type == "cpu" else args[0] if name == "copy_" else None
    return not (asked and on_host is not None and on_host.is_pinned())


def _place() -> str:
    ours = [frame for frame in traceback.extract_stack() if "site-packages" not in frame.filename]
    asked = [frame for frame in ours if Path(frame.filename).parent.name != "fake_cuda"][::-1][:2]
    return " < ".join(f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno}" for frame in asked)
