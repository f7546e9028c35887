"""The task of a workload that a file of the workspace defines (docs/own-models.md)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from shardlab.errors import InputError
from shardlab.files import plugin_source
from shardlab.matrix.cell import Cell
from shardlab.plugins import own_code
from shardlab.registry import OptionValue
from trainers.data.data_sets import DataSource
from trainers.model import counted_flops
from trainers.plans.own import OwnPlan
from trainers.plugins import own_model
from trainers.plugins.own_model import OwnModel
from trainers.task import Batch, Task
from trainers.tasks.device_copy import copy_to_device

FLOPS_FROM_FILE = "FLOPS_PER_UNIT of the file"


class OwnTask(Task):
    """The task of a user's file. plugin: the definitions of the file. code: the digest of the file. options: the arguments
    of its function `model`."""

    def __init__(self, plugin: OwnModel, code: str, options: dict[str, OptionValue]) -> None:
        self._plugin, self._options = plugin, options
        self.units_per_item = plugin.units_per_item
        file_name = plugin.file.rpartition("/")[2]
        # The code of the file decides what the items contain, so the digest of the code identifies the data.
        sha256 = hashlib.sha256(f"items of {file_name} {code}".encode()).hexdigest()
        self.source = DataSource(name=f"batch() of {file_name}", sha256=sha256, synthetic=False, items=plugin.items)
        if plugin.data is not None:
            self.source = plugin.data.source
        self._plan: OwnPlan | None = None

    def model(self) -> nn.Module:
        module = self._plugin.call_function("model", **self._options)
        if not isinstance(module, nn.Module):
            raise InputError(f"{self._plugin.file}: model() returned {_describe_value(module)}. Allowed: a torch.nn.Module.")
        return module

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        if self._plugin.blocks is None:
            return find_repeated_blocks(model)
        listed_blocks = list(self._plugin.call_function("blocks", model))
        module_ids = {id(module) for module in model.modules()}
        if foreign_block := next((block for block in listed_blocks if id(block) not in module_ids), None):
            raise InputError(
                f"{self._plugin.file}: blocks() returned {_describe_value(foreign_block)} that is not in the model."
            )
        return listed_blocks

    def plan(self) -> OwnPlan:
        """As `Task.plan`. Raises InputError if the blocks of the model do not fit tensor or pipeline parallelism."""
        if self._plan is None:
            self._plan = self._make_plan()
        return self._plan

    def _make_plan(self) -> OwnPlan:
        hidden_shapes: list[tuple[int, ...]] = []

        def record_shapes(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            block_tensors = [*inputs, output]
            if len(block_tensors) != 2 or not all(isinstance(value, torch.Tensor) for value in block_tensors):
                raise InputError(
                    f"{self._plugin.file}: a block takes {_describe_value(inputs)} and returns "
                    f"{_describe_value(output)}. Needed for tensor and pipeline parallelism: blocks that take one "
                    "tensor and return one."
                )
            hidden_shapes.extend(tuple(value.shape[1:]) for value in block_tensors)

        with torch.device("meta"):
            model = self.model().eval()
        for block in self.blocks(model):
            block.register_forward_hook(record_shapes)
        inputs, targets = (part.to("meta") for part in self.read_items(np.arange(1)))
        error_hint = "Tensor and pipeline parallelism need a model that computes on the meta device."
        with own_code.raise_plugin_errors(self._plugin.file, error_hint), torch.no_grad():
            self.outputs(model, Batch(inputs, targets))
        return OwnPlan(self._plugin, self.blocks, model, hidden_shapes)

    def flops_per_unit(self) -> float | None:
        if self._plugin.flops_per_unit is not None:
            return self._plugin.flops_per_unit
        try:
            return counted_flops.count_flops(self, Batch(*self.read_items(np.arange(1)))).flops or None
        except Exception:  # noqa: BLE001 - a user's code may raise anything on the meta device; `jobs workloads` shows why
            return None

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        inputs, targets = self.read_items(indices)
        return Batch(inputs=copy_to_device(inputs.numpy(), device), targets=copy_to_device(targets.numpy(), device))

    def read_items(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The (inputs, targets) of the items with these indices, (n,), on the CPU. Raises InputError if the function `batch` of
        the file does not return two tensors with one entry for each item."""
        batch = self._plugin.call_function("batch", torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64)))
        is_pair = isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(part, torch.Tensor) for part in batch)
        if not is_pair or any(part.ndim == 0 or len(part) != len(indices) or part.device.type != "cpu" for part in batch):
            raise InputError(
                f"{self._plugin.file}: batch() returned {_describe_value(batch)} for {len(indices)} items. Allowed: "
                "(inputs, targets), two tensors on the CPU, whose first dimension is the number of items."
            )
        return cast("tuple[torch.Tensor, torch.Tensor]", tuple(part.detach().contiguous() for part in batch))

    def check_items_repeat(self) -> None:
        """Raises InputError if two calls of `batch` for the same items return different tensors, because strategies would then
        train on different data."""
        indices = np.arange(min(2, self.source.items))
        for first_read, second_read in zip(self.read_items(indices), self.read_items(indices), strict=True):
            if not torch.equal(first_read, second_read):
                raise InputError(
                    f"{self._plugin.file}: batch() returned other tensors for the same items. Needed: the same item "
                    "at each call, so that each strategy trains on the same data: draw random items once, by a seeded "
                    "torch.Generator."
                )

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs = batch.inputs
        if inputs.is_floating_point():  # inputs need the dtype of the weights, which some strategies keep in 16 bits
            inputs = inputs.to(next(model.parameters()).dtype)
        outputs = model(inputs)
        if not isinstance(outputs, torch.Tensor):
            raise InputError(f"{self._plugin.file}: the model returned {_describe_value(outputs)}. Allowed: a tensor.")
        return outputs

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._plugin.loss is None:
            return super().criterion(outputs, targets)
        loss = self._plugin.call_function("loss", outputs.float(), targets)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise InputError(
                f"{self._plugin.file}: loss() returned {_describe_value(loss)}. Allowed: the mean loss, a 0-dim tensor."
            )
        return loss


def build(cell: Cell, data_path: Path, *, file: Path) -> OwnTask:
    """The task of a cell. file: the user's file. Raises InputError if the file was changed after the run was submitted, or if
    its definitions are wrong."""
    source = plugin_source.read_submitted_plugin(file, cell.workload_code)
    plugin = own_model.load_definitions(source)
    task = OwnTask(plugin, source.digest, {entry.name: cell.options.get(entry.name, entry.default) for entry in plugin.options})
    task.check_items_repeat()
    return task


def find_repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, found by a rule: the members of the longest list (`nn.ModuleList` or `nn.Sequential`)
    whose members all have the same class and have parameters. Empty if there is no such list."""
    longest_list: list[nn.Module] = []
    for module in model.modules():
        members = list(module) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        type_counts = Counter(type(member) for member in members)
        if (
            len(type_counts) == 1
            and len(members) > max(1, len(longest_list))
            and all(any(True for _ in m.parameters()) for m in members)
        ):
            longest_list = members
    return longest_list


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} on {value.device.type}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(map(_describe_value, value))})"[:200]
    return f"a {type(value).__name__}"
