"""Data of the user's own models: the three kinds of data sets, and that all strategies train on the same items in the same
order."""

import json

import pytest
import torch
from PIL import Image
from support_own import described, run_dir_of

from shardlab.errors import InputError
from trainers import own_data
from trainers.data import tokenizing
from trainers.data.order import TIMED, DataOrder

pytest_plugins = ["support_trainers"]
MODEL = """\
"A linear model whose batch() notes the items."
import json, os
from pathlib import Path
import torch
from torch import nn
ITEMS = 64
points = torch.randn(ITEMS, 4, generator=torch.Generator().manual_seed(0))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 3))
def batch(items):
    with Path({folder!r}, os.environ.get("RANK", "none")).open("a") as log:
        log.write(json.dumps(items.tolist()) + "\\n")
    return points[items], items % 3
def tensor_parallel(block, ranks):
    return {{"up": "columns", "down": "rows"}}
"""


def batches(bench, folder, strategy, **keys):
    """Trains the user's model for three steps on two ranks. Returns (for each rank, the list of the items in each step; the
    cell)."""
    noted = folder / "noted"
    noted.mkdir(parents=True)
    (known,) = described(folder, MODEL.format(folder=str(noted))).plugins
    run_dir = run_dir_of(bench, folder, known, strategy, gpus=2, steps=3, **keys)
    code, errors = bench.finish(run_dir)
    assert code == 0, errors
    parts = [[json.loads(line) for line in (noted / str(rank)).read_text().splitlines()] for rank in range(2)]
    # shardlab also calls `batch`, a function of the model file, with one or two items to check the file and to count
    # operations. These calls belong to no step, so they are left out.
    return [[items for items in part if len(items) > 2] for part in parts], run_dir.read_run().cell


@pytest.mark.parametrize(("strategy", "parts"), [("ddp", 2), ("fsdp2", 2), ("zero2", 2), ("tp", 1)])
def test_every_strategy_trains_on_the_same_items_in_the_same_order(bench, tmp_path, strategy, parts):
    found, cell = batches(bench, tmp_path, strategy, **({"tp": 2} if strategy == "tp" else {}))
    order = DataOrder(64, cell.global_batch_size, cell.seed)
    expected = [order.list_batch_items(TIMED, step).tolist() for step in range(3)]
    assert len(expected[0]) == 8
    if parts == 1:
        assert found[0] == found[1] == expected
    else:
        assert [one + other for one, other in zip(*found, strict=True)] == expected


def test_an_iterable_of_tensors_keeps_its_order_and_is_identified_by_its_content():
    pairs = [(torch.full((2,), float(number)), torch.tensor(number % 3)) for number in range(7)]
    data = own_data.tensors(iter(pairs))
    inputs, targets = data.batch(torch.tensor([5, 0]))
    assert inputs.tolist() == [[5.0, 5.0], [0.0, 0.0]]
    assert targets.tolist() == [2, 0]
    assert (data.source.items, data.classes, data.units_per_item) == (7, 3, 1)
    assert data.source.sha256 == own_data.tensors(pairs).source.sha256 != own_data.tensors(pairs[::-1]).source.sha256
    for wrong in ([], [torch.zeros(2)], [*pairs, (torch.zeros(3), torch.tensor(0))]):
        with pytest.raises(InputError):
            own_data.tensors(wrong)


def test_images_in_class_folders_are_read(tmp_path):
    for label, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        folder = tmp_path / "pets" / "train" / label
        folder.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (20, 20), colour).save(folder / f"{number}.jpg")
    data = own_data.image_folder(str(tmp_path / "pets"), 16)
    inputs, targets = data.batch(torch.arange(6))
    assert inputs.shape == (6, 3, 16, 16)
    assert targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert inputs[0, 2].mean() > inputs[0, 0].mean()
    assert data.classes == 2


def test_sequences_of_a_token_file_are_read(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghij" * 20)
    tokenizing.tokenize_texts([tmp_path / "text.txt"], tmp_path / "text.tokens", "bytes")
    data = own_data.token_file(str(tmp_path / "text.tokens"), 10)
    inputs, targets = data.batch(torch.tensor([0]))
    assert bytes(inputs[0].tolist()) == b"abcdefghij"
    assert bytes(targets[0].tolist()) == b"bcdefghija"
    assert (data.classes, data.units_per_item) == (256, 10)
    with pytest.raises(InputError, match="has to be absolute"):
        own_data.token_file("text.tokens", 10)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("DATA = 3\n", "DATA is a int"),
        ("DATA = own_data.token_file('/none.tokens', 8)\n", "mine.py:9: InputError: /none.tokens: no such file"),
        ("DATA = own_data.tensors(pairs)\nITEMS = 3\n", "defines DATA and ITEMS"),
        ("DATA = own_data.tensors(pairs)\n", ""),
    ],
)
def test_a_model_file_may_name_its_data(tmp_path, more, said):
    text = """"A model of data."
import torch
from torch import nn
from trainers import own_data
pairs = [(torch.full((2,), float(number)), torch.tensor(number % 3)) for number in range(7)]
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
# DATA
"""
    found = described(tmp_path, text + more)
    assert said in found.fault
    assert bool(found.plugins) is not bool(said)
