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

    number: the index of this object in `StorageLog.storages`. nbytes: the present size. used_as_weight: whether an operator
    used it as an nn.Parameter or as a 16-bit copy of a weight. is_saved: whether it was allocated in forward (or when forward
    was recomputed) and still existed when backward continued. outlives_step: whether it existed at the end of the step.
    """

    __slots__ = ("first_change_index", "is_saved", "nbytes", "number", "outlives_step", "used_as_weight")

    def __init__(self, number: int, nbytes: int, first_change_index: int | None) -> None:
        self.number, self.nbytes = number, nbytes
        # The index of the storage's first change if the storage was first seen as the input of an operator; None if it was
        # first seen as an output.
        self.first_change_index = first_change_index
        self.used_as_weight = self.is_saved = self.outlives_step = False


class StorageChange(NamedTuple):
    """A change of a storage's size."""

    t_s: float
    """Seconds since the start of the step."""
    phase: str
    """One of PHASES."""
    number: int
    """The storage's number."""
    nbytes: int
    """Added bytes; negative if the storage shrank or was released."""


class StorageLog(TorchDispatchMode):
    """A context around a step. It sees the inputs and outputs of all operators, and when a storage is resized or released.

    Some storages are read by an operator although no operator was seen to allocate them. If such a storage still exists after
    the step, it is recorded as memory from before the step. Else it is recorded from its first use on; gloo allocates such
    storages in its collectives. Not seen are memory that an operator allocates and releases internally, memory of libraries,
    and memory from before the step that no operator uses.

    device: storages on other devices are ignored. between_passes: called before each operator that runs after a backward pass
    and before the next forward pass.
    """

    def __init__(self, device: torch.device, between_passes: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._between_passes = device, between_passes
        self._after_backward = False
        self.storages: list[TensorStorage] = []
        self.changes: list[StorageChange] = []
        # An address is that of torch's StorageImpl; it is unique as long as the storage exists.
        self._storage_by_address: dict[int, TensorStorage] = {}
        self._release_callbacks: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._forward_storages: dict[int, TensorStorage] = {}  # storages that the current forward pass allocated
        self._start_s = 0.0

    def __enter__(self) -> StorageLog:
        self._start_s = time.perf_counter()
        # FSDP frees and allocates storages by this method, which is not an operator, so the method is replaced during the step.
        self._original_resize = original_resize = torch.UntypedStorage.resize_

        def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
            self._find_or_record(storage)
            result = original_resize(storage, size)
            self._record_size(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_record  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]
        self._release_callbacks.clear()
        for storage in self._storage_by_address.values():
            storage.outlives_step = True
            if storage.first_change_index is not None:
                self.changes[storage.first_change_index] = self.changes[storage.first_change_index]._replace(
                    t_s=0.0, phase=OUTSIDE
                )

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(tensor_class, "__tensor_flatten__") for tensor_class in types):
            # After NotImplemented, DTensor and similar classes call operators on their inner tensors, which have the memory.
            return NotImplemented
        inputs = list(_list_plain_tensors(pytree.tree_leaves((args, kwargs))))
        self._enter_phase(_find_current_phase())
        for tensor in inputs:
            storage = self._find_or_record(tensor.untyped_storage())
            if storage is not None and (isinstance(tensor, torch.nn.Parameter) or cast_weights.is_weight_copy(tensor)):
                storage.used_as_weight = True
        outputs = operator(*args, **(kwargs or {}))
        for tensor in _list_plain_tensors(pytree.tree_leaves(outputs)):
            self._find_or_record(tensor.untyped_storage(), is_output=True)
        return outputs

    def find_storage(self, tensor: torch.Tensor) -> TensorStorage | None:
        """The storage of a tensor, or of a DTensor's local tensor; None if it is on another device. A storage that was not
        known is recorded from now on."""
        local_tensor = getattr(tensor, "_local_tensor", tensor)
        return self._find_or_record(local_tensor.untyped_storage()) if _is_plain(local_tensor) else None

    def _enter_phase(self, phase: str) -> None:
        """Detect the end of a forward or a backward pass. phase: the phase of the operator that runs next."""
        if phase == BACKWARD:
            for storage in self._forward_storages.values():
                storage.is_saved = True
            self._forward_storages.clear()
        self._after_backward = phase == BACKWARD or (phase == OUTSIDE and self._after_backward)
        if phase == OUTSIDE and self._after_backward:
            self._between_passes()

    def _find_or_record(self, memory: torch.UntypedStorage, *, is_output: bool = False) -> TensorStorage | None:
        if (storage := self._storage_by_address.get(memory._cdata)) is not None:
            return storage
        if memory.device.type != self._device.type:
            return None
        storage = TensorStorage(len(self.storages), memory.nbytes(), None if is_output else len(self.changes))
        self.storages.append(storage)
        self._storage_by_address[memory._cdata] = storage
        self._release_callbacks[storage.number] = weakref.ref(memory, partial(self._record_release, memory._cdata, storage))
        self._record_change(storage, storage.nbytes)
        if is_output and _find_current_phase() == FORWARD:
            self._forward_storages[storage.number] = storage
        return storage

    def _record_size(self, torch_storage: torch.UntypedStorage) -> None:
        storage = self._storage_by_address.get(torch_storage._cdata)
        if storage is not None and torch_storage.nbytes() != storage.nbytes:
            self._record_change(storage, torch_storage.nbytes() - storage.nbytes)
            storage.nbytes = torch_storage.nbytes()

    def _record_release(self, storage_address: int, storage: TensorStorage, _: object) -> None:
        self._storage_by_address.pop(storage_address, None)
        self._forward_storages.pop(storage.number, None)
        self._record_change(storage, -storage.nbytes)

    def _record_change(self, storage: TensorStorage, nbytes: int) -> None:
        elapsed_s = time.perf_counter() - self._start_s if self._start_s else 0.0
        self.changes.append(StorageChange(elapsed_s, _find_current_phase(), storage.number, nbytes))


def _find_current_phase() -> str:
    """The current phase. It is FORWARD if gradients are enabled; this is also so when backward recomputes a part of forward."""
    if torch.is_grad_enabled():
        return FORWARD
    return BACKWARD if torch._C._current_graph_task_id() != -1 else OUTSIDE


def _list_plain_tensors(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and _is_plain(leaf))


def _is_plain(tensor: torch.Tensor) -> bool:
    return not hasattr(type(tensor), "__tensor_flatten__") and tensor.layout is torch.strided
