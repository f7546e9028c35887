"""The counts of a pass: blocks that pass on their input change no count, and autograd's saved tensors are counted by place."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support_configured import write
from torch import nn

from trainers.model import counted_pass
from trainers.task import Batch, Task
from trainers.tasks import vision_library

SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 64}
OPTIONS = {"data": "synthetic", "tokens_file": None, "dropout": False}


def count(folder, model_type, *, cast=None, **content):
    vision_library.load()  # before any model of transformers is imported
    from trainers.description.describe_model import one_process_cell
    from trainers.tasks import configured

    file = folder / write(folder, model_type, **SMALL, **content)
    cell = one_process_cell("mine", 16, OPTIONS)
    task = configured.make_task({"transformers": json.loads(file.read_text())}, cell, Path(), twin=False)
    with torch.device("meta"):
        model = task.model().train()
    items = task.fetch(np.arange(1), torch.device("cpu"))
    return counted_pass.count_pass(task, model, counted_pass.make_batch(items, 2), cast=cast, backward=True)


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "content"),
    [
        ("llama", {}),
        ("gemma3_text", {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 4}),  # every sixth block has another mask
        (
            "qwen3_moe",  # every third block has experts
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 3},
        ),
    ],
)
def test_blocks_that_do_not_run_count_as_much_as_equal_blocks(monkeypatch, tmp_path, model_type, content, cast):
    few = count(tmp_path, model_type, cast=cast, **content)
    monkeypatch.setattr(counted_pass, "RUN_BLOCKS", 100)
    assert few == count(tmp_path, model_type, cast=cast, **content)
    assert few.unused == []


class Doubled(nn.Module):
    """Two linear layers. The output of the first one is saved by its own square and by the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.second((hidden * hidden).view(-1, 16)).view(inputs.shape) + inputs


class OwnTask(Task):
    units_per_item = 1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), Doubled(), nn.Linear(8, 3))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model[1]]

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        return Batch(torch.ones(len(indices), 5), torch.zeros(len(indices), dtype=torch.int64))

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch.inputs)


def test_each_storage_counts_once_in_its_place_and_the_batch_and_weights_do_not():
    task, batch = OwnTask(), Batch(torch.ones(4, 5, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"))
    with torch.device("meta"):
        model = task.model()
    found = counted_pass.count_pass(task, model, batch, backward=True)
    # of 4 items in fp32: the input of the first layer, what it writes, and its square; outside of the block: what the block
    # writes, and the gradient of the logits
    assert (found.saved_in_blocks, found.saved_outside) == (4 * 4 * (8 + 16 + 16), 4 * 4 * (8 + 3))
    assert (found.block_flops, found.other_flops) == (4 * 6 * (8 * 16 + 16 * 8), 4 * (4 * 5 * 8 + 6 * 8 * 3))
    assert found.unaligned_flops == 4 * 6 * (5 * 8 + 8 * 3)
    assert (found.hidden, found.width, found.logits, found.ends) == (4 * 8, 8, 4 * 3, (48, 27, 0))
    assert found.unused == ["1.never"]
