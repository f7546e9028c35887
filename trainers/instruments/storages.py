"""Follows the storages of all tensors of a step, from allocation to release. Only this module uses private parts of torch for
this."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.model import cast_weights

FORWARD, BACKWARD, OUTSIDE = PHASES = ("forward", "backward", "outside")


class TensorStorage:
    """A piece of memory that one or more tensors share.

    number: the index of this object in `StorageLog.storages`. nbytes: the present size. as_weight: whether an operator used the
    memory as an nn.Parameter or as a 16-bit copy of a weight. saved: whether the memory was allocated in forward (or when
    forward was recomputed) and still existed when backward continued. stays: whether it still existed at the end of the step.
    """

    __slots__ = ("as_weight", "first", "nbytes", "number", "saved", "stays")

    def __init__(self, number: int, nbytes: int, first: int | None) -> None:
        self.number, self.nbytes = number, nbytes
        # The index of the storage's first change if the storage was first seen as the input of an operator; None if it was
        # first seen as an output.
        self.first = first
        self.as_weight = self.saved = self.stays = False


class StorageChange(NamedTuple):
    """A change of a storage's size. t_s: seconds since the start of the step. phase: one of PHASES. number: the storage's
    number. nbytes: added bytes; negative if the storage shrank or was released."""

    t_s: float
    phase: str
    number: int
    nbytes: int


class StorageLog(TorchDispatchMode):
    """A context around a step. It sees the inputs and outputs of all operators, and when a storage is resized or released.

    Some storages are read by an operator although no operator was seen to allocate them. If such a storage still exists after
    the step, it is recorded as memory from before the step. Else it is recorded from its first use on; gloo allocates such
    storages in its collectives. Not seen are memory that an operator allocates and releases internally, memory of libraries,
    and memory from before the step that no operator uses.

    device: storages on other devices are ignored. between: called before each operator that runs after a backward pass and
    before the next forward pass.
    """

    def __init__(self, device: torch.device, between: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._between = device, between
        self._after_backward = False
        self.storages: list[TensorStorage] = []
        self.changes: list[StorageChange] = []
        # The keys of `_live` are addresses of torch's StorageImpl; an address is unique as long as the storage exists.
        self._live: dict[int, TensorStorage] = {}
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._fresh: dict[int, TensorStorage] = {}  # storages that the current forward pass allocated
        self._began = 0.0

    def __enter__(self) -> StorageLog:
        self._began = time.perf_counter()
        # FSDP frees and allocates storages by this method, which is not an operator, so the method is replaced during the step.
        self._resize = resize = torch.UntypedStorage.resize_

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
            # After NotImplemented, DTensor and similar classes call operators on their inner tensors, which have the memory.
            return NotImplemented
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
        """The storage of a tensor, or of a DTensor's local tensor; None if it is on another device. A storage that was not
        known is recorded from now on."""
        local = getattr(tensor, "_local_tensor", tensor)
        return self._seen(local.untyped_storage()) if _is_plain(local) else None

    def _turn(self, phase: str) -> None:
        """Detect the end of a forward or a backward pass. phase: the phase of the operator that runs next."""
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
    """The current phase. It is FORWARD if gradients are enabled; this is also so when backward recomputes a part of forward."""
    if torch.is_grad_enabled():
        return FORWARD
    return BACKWARD if torch._C._current_graph_task_id() != -1 else OUTSIDE


def _plain(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and _is_plain(leaf))


def _is_plain(tensor: torch.Tensor) -> bool:
    return not hasattr(type(tensor), "__tensor_flatten__") and tensor.layout is torch.strided
