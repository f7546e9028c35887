"""Follows the storages of all tensors of a step, from allocation to release. The use of torch's private parts stays here."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainers import cast_weights

FORWARD, BACKWARD, OUTSIDE = PHASES = ("forward", "backward", "outside")


class TensorStorage:
    """A piece of memory that one or more tensors share.

    nbytes: its present size. as_weight: an operator used it as an nn.Parameter or as a 16-bit copy of a weight. saved: made
    by forward (or by its recomputation) and not released before backward continues. stays: not released at the end of the step.
    """

    __slots__ = ("as_weight", "first", "nbytes", "number", "saved", "stays")

    def __init__(self, number: int, nbytes: int, first: int | None) -> None:
        self.number, self.nbytes = number, nbytes
        self.first = first  # the change with which an operator took it, where nobody was seen to make it
        self.as_weight = self.saved = self.stays = False


class StorageChange(NamedTuple):
    """At t_s (seconds since the step began), in a phase, a storage grew by so many bytes, or shrank (negative)."""

    t_s: float
    phase: str
    number: int
    nbytes: int


class StorageLog(TorchDispatchMode):
    """A context around a step that sees the inputs and outputs of operators, and when each storage is resized or released.

    A storage that an operator reads but no operator made existed before the step if it still exists after the step; else it
    counts from its first use (gloo makes such memory in its collectives). Not seen: memory that an operator allocates and
    releases internally, memory of libraries, and memory from before the step that no operator uses.
    Storages on other devices than `device` are left out. between: called before each operator that comes after a
    backward pass and before the next forward pass.
    """

    def __init__(self, device: torch.device, between: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._between = device, between
        self._after_backward = False
        self.storages: list[TensorStorage] = []
        self.changes: list[StorageChange] = []
        self._live: dict[int, TensorStorage] = {}  # by the address of torch's own StorageImpl, which is its own while it lives
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._fresh: dict[int, TensorStorage] = {}  # made by a forward pass that is not over
        self._began = 0.0

    def __enter__(self) -> StorageLog:
        self._began = time.perf_counter()
        self._resize = resize = torch.UntypedStorage.resize_  # FSDP frees and refills with it, past every operator

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            self._seen(storage)
            done = resize(storage, size)
            self._sized(storage)
            return done

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._ends.clear()
        for storage in self._live.values():
            storage.stays = True
            if storage.first is not None:
                self.changes[storage.first] = self.changes[storage.first]._replace(t_s=0.0, phase=OUTSIDE)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor and its like unfold first: memory is in what they unfold to
        taken = list(_plain(pytree.tree_leaves((args, kwargs))))
        self._turn(_phase())
        for tensor in taken:
            storage = self._seen(tensor.untyped_storage())
            if storage is not None and (isinstance(tensor, torch.nn.Parameter) or cast_weights.is_copy(tensor)):
                storage.as_weight = True
        given = operator(*args, **(kwargs or {}))
        for tensor in _plain(pytree.tree_leaves(given)):
            self._seen(tensor.untyped_storage(), made=True)
        return given

    def find(self, tensor: torch.Tensor) -> TensorStorage | None:
        """The storage of a tensor (of a DTensor's local part), known from now on; None where it lies on another device."""
        local = getattr(tensor, "_local_tensor", tensor)
        return self._seen(local.untyped_storage()) if _is_plain(local) else None

    def _turn(self, phase: str) -> None:
        """Notice where a pass ends, by the phase of the operator that comes next."""
        if phase == BACKWARD:
            for storage in self._fresh.values():
                storage.saved = True
            self._fresh.clear()
        self._after_backward = phase == BACKWARD or (phase == OUTSIDE and self._after_backward)
        if phase == OUTSIDE and self._after_backward:
            self._between()

    def _seen(self, memory: torch.UntypedStorage, *, made: bool = False) -> TensorStorage | None:
        if (storage := self._live.get(memory._cdata)) is not None:
            return storage
        if memory.device.type != self._device.type:
            return None
        storage = TensorStorage(len(self.storages), memory.nbytes(), None if made else len(self.changes))
        self.storages.append(storage)
        self._live[memory._cdata] = storage
        self._ends[storage.number] = weakref.ref(memory, partial(self._ended, memory._cdata, storage))
        self._change(storage, storage.nbytes)
        if made and _phase() == FORWARD:
            self._fresh[storage.number] = storage
        return storage

    def _sized(self, memory: torch.UntypedStorage) -> None:
        storage = self._live.get(memory._cdata)
        if storage is not None and memory.nbytes() != storage.nbytes:
            self._change(storage, memory.nbytes() - storage.nbytes)
            storage.nbytes = memory.nbytes()

    def _ended(self, key: int, storage: TensorStorage, _: object) -> None:
        self._live.pop(key, None)
        self._fresh.pop(storage.number, None)
        self._change(storage, -storage.nbytes)

    def _change(self, storage: TensorStorage, nbytes: int) -> None:
        since = time.perf_counter() - self._began if self._began else 0.0
        self.changes.append(StorageChange(since, _phase(), storage.number, nbytes))


def _phase() -> str:
    """forward: gradients are on, which they also are where backward computes a part of forward again."""
    if torch.is_grad_enabled():
        return FORWARD
    return BACKWARD if torch._C._current_graph_task_id() != -1 else OUTSIDE


def _plain(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and _is_plain(leaf))


def _is_plain(tensor: torch.Tensor) -> bool:
    return not hasattr(type(tensor), "__tensor_flatten__") and tensor.layout is torch.strided
