"""What is counted in a user's model: tensors that autograd saves, operations and parameters, by place."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support_configured import write
from torch import nn

from trainers.model import counted_flops
from trainers.task import Batch, Task
from trainers.tasks import vision_library

SMALL = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
OPTIONS = {"data": "synthetic", "tokens_file": None, "dropout": False}
ITEM = np.arange(1)


def count(task, shallow=None, styles=None, degrees=()):
    vision_library.import_torchvision()  # before any model of transformers is imported
    from trainers.description.count_model import count_model

    with torch.device("meta"):
        model = task.model()
    flops = counted_flops.count_flops(task, task.fetch(ITEM, torch.device("cpu")))
    return count_model(task, model, flops, shallow or task, styles, degrees)


def configured_task(folder, layers, **content):
    vision_library.import_torchvision()
    from trainers.description.describe_model import make_one_process_cell
    from trainers.tasks import configured

    file = folder / write(folder, "llama", **{**SMALL, "num_hidden_layers": layers, **content})
    values = {"transformers": json.loads(file.read_text())}
    return configured.make_task(values, make_one_process_cell("mine", 16, OPTIONS), Path(), twin=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_two_of_many_equal_blocks_save_as_much_as_each_other_block(tmp_path, precision):
    """The rotary embeddings, which the first block saves for all blocks, are outside of blocks."""
    deep, shallow = configured_task(tmp_path / "deep", 8), configured_task(tmp_path / "shallow", 2)
    assert count(deep, shallow).saved[precision] == count(deep).saved[precision]


class Block(nn.Module):
    """Two linear layers. The output of the first one is saved by its square, twice, and the square by the second layer."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16 // ranks), nn.Linear(16 // ranks, 8)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.second((hidden * hidden).flatten(0, -2)).view(inputs.shape) + inputs


class BlocksTask(Task):
    units_per_item = 1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), Block(), Block(), nn.Linear(8, 3))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model[1], model[2]]

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        return Batch(torch.ones(len(indices), 5), torch.zeros(len(indices), dtype=torch.int64))

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch.inputs)


def test_each_storage_counts_once_in_its_place_and_weights_and_the_batch_do_not():
    found = count(BlocksTask(), styles=lambda *_: {"first": "columns", "second": "rows"}, degrees=(2, 4))
    saved = found.saved["fp32"]
    # of an item in fp32: the input of the first layer, what it writes, and its square
    assert (saved.block_whole, saved.block_split, saved.block_input) == (4 * 8, 4 * (16 + 16), 4 * 8)
    # the input of the last layer, and the gradient of the logits; the batch is the input of the first layer
    assert (saved.head, saved.logits, saved.inputs, saved.weights) == (4 * (8 + 3), 4 * 3, 4 * 5 + 8, 0)
    assert (found.block_flops, found.other_flops) == (2 * 6 * (8 * 16 + 16 * 8), 4 * 5 * 8 + 6 * 8 * 3)
    assert (found.kind, found.end_parameters, found.reductions) == ("unknown", (48, 27, 0), (1, 1))
    half, mixed = found.saved["bf16"], found.saved["bf16-autocast"]
    assert (half.block_split, half.head) == (2 * (16 + 16), 2 * (5 + 8 + 3))  # with a copy of the batch
    assert (mixed.weights, mixed.head_weights) == (2 * 2 * 8 * 16, 2 * 8 * 3)  # the batch needs no gradient


class Attention(nn.Module):
    """Attention without a fused kernel, which saves its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = self.first(inputs)[:, None]
        return ((heads @ heads.mT).softmax(-1) @ heads)[:, 0]


class AttentionTask(BlocksTask):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Attention(), Attention(), nn.Flatten(), nn.Linear(24, 3))

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        return Batch(torch.ones(len(indices), 6, 4), torch.zeros(len(indices), dtype=torch.int64))


def test_squares_of_the_length_are_counted_apart():
    found = count(AttentionTask())
    assert (found.kind, found.saved["fp32"].block_squared) == ("transformer", 4 * 6 * 6)
    assert found.attention_flops == 2 * 3 * 2 * (2 * 6 * 6 * 4)  # blocks, forward and backward, products
