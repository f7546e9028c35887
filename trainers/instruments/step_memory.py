"""Follows the memory of a step of an engine, or of several, and finds the category of each storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainers.instruments.storages import StorageLog, TensorStorage

if TYPE_CHECKING:
    from types import TracebackType

    from trainers.engine import Accountable


class StepMemory:
    """A context around one step, or around consecutive steps with a call of `begin_next_step` between them.

    `log` has all changes of memory on a device. A storage has one category from its allocation to its release. If the engine
    keeps the storage (`Accountable.list_tensors_by_category`), the engine names the category; otherwise the category follows
    from the use of the storage by an operator, or from the time of its release."""

    def __init__(self, engine: Accountable, device: torch.device, log: type[StorageLog] = StorageLog) -> None:
        """log: the class of the log, which is StorageLog or a subclass that records more."""
        self._engine = engine
        self._category_by_number: dict[int, str] = {}
        self._searching = False  # whether the log must look for new gradients: from the end of backward to the optimizer's step
        self.log = log(device, self._name_new_gradients)

    def __enter__(self) -> StepMemory:
        self._record_categories(self._engine.list_tensors_by_category())
        self._searching = True
        self._optimizer_hook = self._engine.optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step())
        self.log.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.log.__exit__(kind, error, traceback)
        self._optimizer_hook.remove()
        if error is None:
            self._record_categories(self._engine.list_tensors_by_category())

    def begin_next_step(self) -> None:
        """Record that another step of the engine begins, whose backward pass allocates gradients again."""
        self._searching = True

    def find_category(self, storage_number: int) -> str:
        """The category of the storage with this number in the log. It is known only after the step."""
        storage = self.log.storages[storage_number]
        return self._category_by_number.get(storage_number) or self._find_category_by_use(storage)

    def _find_category_by_use(self, storage: TensorStorage) -> str:
        if storage.used_as_weight:
            return "gathered"
        return "buffer" if storage.outlives_step else "activation" if storage.is_saved else "temporary"

    def _name_new_gradients(self) -> None:
        if self._searching:
            categories = self._engine.list_tensors_by_category().items()
            self._record_categories({name: tensors for name, tensors in categories if name not in ("parameter", "gathered")})

    def _before_optimizer_step(self) -> None:
        self._name_new_gradients()
        self._searching = False

    def _record_categories(self, tensors_by_category: dict[str, list[torch.Tensor]]) -> None:
        for category, tensors in tensors_by_category.items():
            for tensor in tensors:
                if (storage := self.log.find_storage(tensor)) is not None:
                    self._category_by_number.setdefault(storage.number, category)
