"""The tasks of models that a configuration file defines (docs/model-by-configuration.md).

They are language models and image classifiers of transformers, with random weights.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch
from torch import nn

from shardlab.errors import InputError
from shardlab.files import plugin_source
from shardlab.matrix import model_file
from shardlab.matrix.cell import Cell
from trainers.model import configuration, counted_flops, unpacked_attention
from trainers.model.blocks import Blocks
from trainers.plans import derived
from trainers.task import Batch, Task
from trainers.tasks import vision_classifier
from trainers.tasks.convolutional_task import mix_batch_norms
from trainers.tasks.device_copy import copy_to_device
from trainers.tasks.image_task import ImageTask
from trainers.tasks.token_task import TokenTask

if TYPE_CHECKING:
    from trainers.data.sequences import TokenSet
    from trainers.model.configuration import Architecture
    from trainers.plans.plan import ModelPlan

MASKED, SEED = 0.15, 15  # the share of masked positions (Devlin et al., BERT, 2019, section 3.1), and the seed that draws them


class Transformer(Task):
    """The base of tasks with a model of transformers."""

    _architecture: Architecture
    config: Any
    """The configuration, as an object of transformers."""

    def set_architecture(self, architecture: Architecture, config: Any) -> None:
        self._architecture, self.config, self._blocks = architecture, config, Blocks()

    def model(self) -> nn.Module:
        return configuration.build_model(self._architecture, self.config)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return self._blocks.find_blocks(model)

    def flops_per_unit(self) -> float | None:
        return counted_flops.count_task_flops(self)


class CausalTask(Transformer, TokenTask):
    """The task of a language model that predicts the next token."""

    def __init__(self, cell: Cell, data_path: Path, architecture: Architecture, config: Any) -> None:
        self.set_architecture(architecture, config)
        super().__init__(cell, data_path, config.vocab_size)

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return _compute_logits(self._architecture, model, batch.inputs)

    @functools.cached_property
    def _plan(self) -> ModelPlan:
        with torch.device("meta"):
            model = self.model()
        split = derived.derive_split(model, self.blocks(model), self.config)
        assert isinstance(split, derived.Split), "refused at plan time"
        return derived.DerivedPlan(self.seq_len, self.config.hidden_size, split)

    def plan(self) -> ModelPlan:
        return self._plan


class MaskedTask(Transformer, TokenTask):
    """The task of a language model that predicts the tokens at masked positions.

    Each sequence has the same number of masked positions, so that the mean loss of a part of a batch has the right weight. The
    inputs of an item are its tokens, followed by the numbers of its masked positions: (items, seq_len + masked positions).
    """

    def __init__(self, cell: Cell, data_path: Path, architecture: Architecture, config: Any) -> None:
        self.set_architecture(architecture, config)
        assert cell.seq_len is not None, "the workload has a default"
        self._masked_positions = max(1, round(MASKED * cell.seq_len))
        mask_token = getattr(config, "mask_token_id", None)
        self._mask_token = (
            mask_token if isinstance(mask_token, int) and 0 <= mask_token < config.vocab_size else config.vocab_size - 1
        )
        super().__init__(cell, data_path, config.vocab_size)

    def _use_tokens(self, tokens: TokenSet) -> None:
        super()._use_tokens(tokens)
        rule = f"{self.source.sha256}, {self._masked_positions} positions by {self._mask_token}, seed {SEED}"
        sha256 = hashlib.sha256(rule.encode()).hexdigest()
        self.source = msgspec.structs.replace(self.source, name=f"{self.source.name}, {MASKED:.0%} masked", sha256=sha256)

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        tokens = self._tokens.read(indices)[:, :-1]
        positions = np.empty((len(indices), self._masked_positions), np.int64)
        for row, index in enumerate(indices):
            random_numbers = np.random.Philox(key=np.array([SEED, int(index)], np.uint64)).random_raw(self.seq_len)
            positions[row] = np.sort(np.argsort(random_numbers, kind="stable")[: self._masked_positions])
        targets = np.take_along_axis(tokens, positions, axis=1)
        masked = tokens.copy()
        np.put_along_axis(masked, positions, self._mask_token, axis=1)
        inputs = np.concatenate([masked, positions], axis=1)
        return Batch(inputs=copy_to_device(inputs, device), targets=copy_to_device(targets, device))

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        tokens, positions = batch.inputs[:, : self.seq_len], batch.inputs[:, self.seq_len :]
        logits = _compute_logits(self._architecture, model, tokens)
        return logits.gather(1, positions[..., None].expand(-1, -1, logits.shape[-1]))


class ClassifierTask(Transformer, ImageTask):
    """The task of an image classifier of transformers."""

    def __init__(self, cell: Cell, data_path: Path, architecture: Architecture, config: Any) -> None:
        self.set_architecture(architecture, config)
        super().__init__(cell, data_path, config.num_labels)
        config.num_labels = self.classes

    def model(self) -> nn.Module:
        return mix_batch_norms(super().model())

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        images = batch.inputs.to(next(model.parameters()).dtype)
        return cast("torch.Tensor", model(pixel_values=images).logits)


def _compute_logits(architecture: Architecture, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    extra_inputs = {}
    if "attention_mask" in inspect.signature(architecture.model.forward).parameters:
        extra_inputs["attention_mask"] = unpacked_attention.make_unpadded_mask(tokens)
    return cast("torch.Tensor", model(input_ids=tokens, **extra_inputs).logits)


TASKS: dict[str, Any] = {
    "causal language model": CausalTask,
    "masked language model": MaskedTask,
    "image classifier": ClassifierTask,
}


def make_task(configuration_content: dict[str, Any], cell: Cell, data_path: Path, *, twin: bool) -> Task:
    """The task of a model, by the content of its configuration file.

    twin: whether to make the task of its tiny twin. Raises InputError without the name of the file.
    """
    dropout = bool(cell.options.get("dropout", False))
    if "torchvision" in configuration_content:
        return vision_classifier.build(cell, data_path, configuration_content["torchvision"], twin=twin)
    config_values = configuration_content["transformers"]
    architecture = configuration.find_architecture(config_values)
    layer_count = cast("int | None", cell.options.get("n_layer"))
    config_values = configuration.shrink_to_twin(architecture, config_values) if twin else config_values
    config = configuration.make_config(architecture, config_values, dropout=dropout, layer_count=layer_count)
    task: Task = TASKS[architecture.kind](cell, data_path, architecture, config)
    return task


def build(cell: Cell, data_path: Path, *, file: Path, twin: bool) -> Task:
    """The task of a cell. file: the configuration file. twin: whether the cell uses the tiny twin.

    Raises InputError if the file was changed after the run was submitted, or if transformers cannot build the model.
    """
    source = plugin_source.read_submitted_plugin(file, cell.workload_code)
    try:
        return make_task(model_file.read_content(source.contents[file.name]), cell, data_path, twin=twin)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
